//! A running gateway: starts the worker threads, the admin thread and the background threads, and passes reloads and
//! the drain on to them. Each worker thread has its own runtime, listeners and connections; workers share the counter
//! table and the compiled configuration. Signals and file changes are handled in `cli::run`.

use std::cell::RefCell;
use std::convert::Infallible;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use socket2::Socket;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::mpsc::{Sender, UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::spawn_local;

use crate::access_log::{LogSender, WriterThread};
use crate::admin::AccessEdit;
use crate::admin::client_store::{ClientStore, FileChange, FileClients, StoredClients};
use crate::admin::events::Events;
use crate::admin::history::{self, History};
use crate::admin::{self, AcceptState, AdminScope, AdminState, DecisionApi, audit_log};
use crate::downstream::connection_limit::{ConnectionLimit, raise_descriptor_limit};
use crate::downstream::listener::{InheritedSockets, Listeners, OpenSocket, WorkerListener, open_one};
use crate::downstream::listener_context::{Listener, ListenerConfig, ListenerContext};
use crate::key_set_fetcher::KeySetFetcher;
use crate::notify::sender::{Destination, EventSender};
use crate::notify::{MarkEvent, MarkReader, Marks, SentMarks};
use crate::persistence::background::BackgroundWriter;
use crate::persistence::counters::Counters;
use crate::proxy::served_config::ServedConfig;
use crate::proxy::worker_config::RecordOutputs;
use crate::proxy::worker_state::{TopKeysQuery, WorkerState};
use crate::spans::SpanSender;
use crate::upstream::health_check;
use crate::upstream::server_health::{self, UpstreamHealth};
use crate::upstream::service_records::{self, KnownServices};
use client_limits::{CompiledLimits, LimitsState};
use error::{ReloadError, StartError};
use ordered_certificates::OrderedCertificates;
use shared_clients::SharedClients;
use shared_deny::SharedDeny;
use transom_config::clients;
use transom_config::jwt::KeySetSource;
use transom_config::listen::Admin;
use transom_config::listen_address::{ListenAddress, ListenSocket};
use transom_config::span_export::Tracing;
use transom_config::upstream::{ServiceSource, Target, Upstream};
use transom_config::{Config, REQUEST_BUCKETS_MAX, lint};
use transom_jwt::published_keys::{KeySet, PublishedKeys};
use transom_limiter::handles::Handle as _;
use transom_limiter::rule_set::RuleChanges;
use transom_limiter::window::{END_MAX_MS, PERIOD_MAX_MS};
use transom_rules::client_plans::RulesInUse;
use transom_rules::compiled_config::LiveData;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::events::{
    AccessLogMetrics, AdminMetrics, DecisionMetrics, DroppedMarks, ExpiryGauges, KeySetMetrics, ListenerMetrics,
    NotifyMetrics, SnapshotMetrics, SpanMetrics,
};
use transom_runtime::metrics::redis::StoreMetrics;
use transom_runtime::metrics::storage::REQUEST_BOUNDS_MAX;
use transom_runtime::metrics::{Registry, WorkerId};
use transom_store::counter_access::CounterAccess;
use transom_store::map_follower::SharedMap;
use transom_store::shared_counters::{SharedByWorkers, SharedCounters};
use worker::{DrainTimes, WorkerCommand};

pub mod client_limits;
pub mod error;
mod ordered_certificates;
mod shared_clients;
mod shared_deny;
mod worker;

/// How long a stopping gateway keeps idle connections open for requests that are on their way. It accepts no new
/// connections meanwhile.
const IDLE_DRAIN: Duration = Duration::from_secs(1);
/// After an upgrade, idle connections are closed this long before the drain limit, or at half of the limit if that is
/// later: clients may be about to send requests on them.
const IDLE_CLOSE_MARGIN: Duration = Duration::from_secs(2);
/// How long a process that was replaced waits for a store that cannot be reached, to report what it has counted without it.
const REPORT_AFTER_UPGRADE: Duration = Duration::from_secs(600);

/// How long a start or reload waits for the servers of service records.
const FIRST_LOOK_UP: Duration = Duration::from_secs(3);

/// The metrics can hold as many buckets as can be configured.
const _: () = assert!(REQUEST_BUCKETS_MAX <= REQUEST_BOUNDS_MAX);

/// Clock difference that is warned of.
const CLOCK_OFFSET_MAX_S: u64 = 5;

/// Limit for writing the last access log lines.
const LOG_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// Limit for exporting the last spans.
const SPAN_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Limit for sending the last notifications.
const NOTIFY_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// A running gateway.
pub struct Gateway {
    http: Vec<ListenAddress>,
    https: Vec<ListenAddress>,
    ratelimit_service: Vec<ListenAddress>,
    forward_auth: Vec<ListenAddress>,
    admin: Option<ListenAddress>,
    metrics: Vec<ListenAddress>,
    counters: Arc<Counters>,
    snapshot_writer: Option<BackgroundWriter>,
    config: Config,
    pub registry: Arc<Registry>,
    expiries: ExpiryGauges,
    shared_by_workers: SharedByWorkers,
    ready: watch::Sender<bool>,
    worker_commands: Vec<UnboundedSender<WorkerCommand>>,
    /// The listening sockets with their configured addresses; passed on in an upgrade.
    sockets: Vec<OpenSocket>,
    /// Inherited sockets whose files are removed as soon as this process serves.
    unused_sockets: Vec<OpenSocket>,
    accept_state: watch::Sender<AcceptState>,
    worker_threads: Vec<JoinHandle<()>>,
    admin_thread: Option<JoinHandle<()>>,
    /// The settings for new connections.
    listener_config: Arc<ListenerConfig>,
    connection_limit: Arc<ConnectionLimit>,
    /// The decision service of the current configuration.
    decision_api: watch::Sender<Option<Arc<DecisionApi>>>,
    /// The current configuration, with the limits of single clients.
    served: Option<Arc<ServedConfig>>,
    /// The upstream servers, as all workers know them.
    upstream_health: watch::Sender<Vec<Arc<UpstreamHealth>>>,
    /// The settings of the admin address.
    admin_settings: watch::Sender<Admin>,
    /// The history of the dashboard, which the admin thread makes.
    history: Arc<Mutex<History>>,
    /// Changes of clients by requests to the admin address, for the code that applies configurations.
    file_changes: Option<UnboundedReceiver<FileChange>>,
    access_edits: Option<UnboundedReceiver<AccessEdit>>,
    /// The thread of the active health checks, if any are configured.
    health_thread: Option<JoinHandle<()>>,
    /// Follows the service records that list servers, once there are any.
    services: Option<ServicesThread>,
    known_services: Arc<KnownServices>,
    /// Follows the clients in the store, if they are there.
    shared_clients: Option<SharedClients>,
    limits_state: LimitsState,
    /// Notified when clients of the store have limits that the rules do not know.
    limits_changed: Arc<Notify>,
    /// Fetches keys for tokens, if configured.
    key_set: Option<KeySetThread>,
    /// Number of the threads that fetched a key set so far.
    key_set_threads: usize,
    /// Orders certificates over ACME.
    ordered_certificates: OrderedCertificates,
    clock: Clock,
    /// Whether the last check found that window time and wall clock differ.
    is_clock_off: bool,
    /// Number of workers.
    workers: usize,
    outputs: RecordOutputs,
    log_writers: Vec<WriterThread>,
    span_exporters: Vec<WriterThread>,
    /// Follows the deny entries of the store, if configured.
    shared_deny: Option<SharedDeny>,
    /// For the admin API.
    shared_deny_map: watch::Sender<Option<SharedMap>>,
    /// Sends notifications, if configured.
    notifier: Option<Notifier>,
    notifier_threads: Vec<WriterThread>,
    sent_marks: Arc<SentMarks>,
    /// Unix milliseconds.
    started_ms: u64,
}

/// The queue of the thread that sends notifications. The thread ends when its last sender is dropped.
struct Notifier {
    destination: Destination,
    events: Sender<MarkEvent>,
}

/// The thread that follows service records. It ends when this is dropped.
struct ServicesThread {
    sources: watch::Sender<Vec<ServiceSource>>,
    thread: JoinHandle<()>,
}

/// The thread that fetches a key set. It ends when this is dropped.
struct KeySetThread {
    source: KeySetSource,
    keys: Arc<PublishedKeys>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// A key set that was fetched before, perhaps by another process.
pub struct KnownKeySet {
    pub url: String,
    pub text: Arc<[u8]>,
    /// Unix milliseconds.
    pub fetched_at_ms: u64,
}

/// Dropped once all workers use a configuration.
pub struct PendingReload {
    former_rules: Option<Arc<RulesInUse>>,
    decision_api: watch::Sender<Option<Arc<DecisionApi>>>,
    _applied: Sender<Infallible>,
}

impl Drop for PendingReload {
    fn drop(&mut self) {
        self.former_rules = None;
        // Wakes requests to the admin address that wait until all workers use limits of a client.
        self.decision_api.send_modify(|_same| ());
    }
}

/// A new configuration, which workers apply.
#[derive(Debug)]
pub struct Applied(tokio::sync::mpsc::Receiver<Infallible>);

impl Applied {
    /// Waits until all workers use the configuration.
    pub async fn wait(mut self) {
        // Nothing is sent: the channel closes when all workers have dropped their ends.
        self.0.recv().await;
    }
}

/// Version of the dashboard's history in [`Former`].
pub const HISTORY_FORMAT: u32 = history::FORMAT;

/// What a process has of the one that it replaces.
#[derive(Default)]
pub struct Former {
    /// The counter memory.
    pub counters: Option<OwnedFd>,
    pub key_set: Option<KnownKeySet>,
    /// The history of the dashboard, as [`History::to_text`] returns it.
    pub history: String,
}

impl Gateway {
    /// Starts a gateway and accepts connections at once.
    pub fn start(config: Config, clock: Clock) -> Result<Gateway, StartError> {
        let mut gateway = Gateway::start_with(config, clock, InheritedSockets::default(), Former::default())?;
        gateway.start_accepting();
        Ok(gateway)
    }

    /// Starts a gateway on inherited sockets, and opens the other addresses. It accepts no connection before
    /// [`Gateway::start_accepting`]; nothing can fail after this returns.
    pub fn start_with(
        mut config: Config,
        clock: Clock,
        mut inherited: InheritedSockets,
        former: Former,
    ) -> Result<Gateway, StartError> {
        let workers = config.general.workers.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
        if !(1..END_MAX_MS - PERIOD_MAX_MS).contains(&clock.now().unix_ms) {
            return Err(StartError::Clock);
        }
        let counters = Counters::open(&config.counters, former.counters, &clock).map_err(StartError::Counters)?;
        let counters = Arc::new(counters);
        let registry = Arc::new(Registry::new(&config.metrics.request_buckets));
        raise_descriptor_limit();
        let (ordered, live_certificates) = OrderedCertificates::of(&config.listen);
        let listener_config = ListenerConfig::new(&config.listen, &live_certificates, None).map_err(StartError::Tls)?;
        let opened = Listeners::open(&config.listen, workers, &mut inherited)
            .map_err(|(address, source)| StartError::Listen { address, source })?;
        let mut gateway = Gateway {
            http: opened.http,
            https: opened.https,
            ratelimit_service: opened.ratelimit_service,
            forward_auth: opened.forward_auth,
            admin: None,
            metrics: Vec::new(),
            listener_config,
            connection_limit: ConnectionLimit::new(&config.listen),
            counters: Arc::clone(&counters),
            snapshot_writer: None,
            expiries: expiries(&registry, &config),
            registry,
            shared_by_workers: SharedByWorkers::new(Arc::clone(&counters.table), clock.clone()),
            ready: watch::Sender::new(true),
            worker_commands: Vec::new(),
            sockets: opened.sockets,
            unused_sockets: Vec::new(),
            accept_state: watch::Sender::new(AcceptState::NotStarted),
            worker_threads: Vec::new(),
            admin_thread: None,
            decision_api: watch::Sender::default(),
            served: None,
            upstream_health: watch::Sender::default(),
            admin_settings: watch::Sender::new(config.admin.clone()),
            history: Arc::default(),
            file_changes: None,
            access_edits: None,
            health_thread: None,
            services: None,
            known_services: Arc::default(),
            shared_clients: None,
            limits_state: LimitsState::default(),
            limits_changed: Arc::default(),
            key_set: None,
            key_set_threads: 0,
            ordered_certificates: ordered,
            clock: clock.clone(),
            is_clock_off: false,
            workers,
            outputs: RecordOutputs::default(),
            log_writers: Vec::new(),
            span_exporters: Vec::new(),
            shared_deny: None,
            shared_deny_map: watch::Sender::default(),
            notifier: None,
            notifier_threads: Vec::new(),
            sent_marks: Arc::default(),
            started_ms: clock.now().unix_ms,
            config: config.clone(),
        };
        audit_log::check(&config.admin).map_err(StartError::AuditLog)?;
        gateway.outputs = RecordOutputs {
            access_log: gateway.open_access_log(&config).map_err(StartError::AccessLog)?,
            spans: gateway.start_span_exporter(&config).map_err(StartError::Tracing)?,
            marks: None,
            log_throttle: Arc::default(),
        };
        gateway.follow_services(&config)?;
        let upstream_health = gateway.update_upstream_health(&config);
        gateway.start_health_checks(&upstream_health)?;
        let published_keys = gateway.fetch_key_set(&config, former.key_set)?;
        gateway.ordered_certificates.use_orders(&config, live_certificates, &gateway.registry, &clock)?;
        gateway.follow_shared_deny(&config)?;
        gateway.shared_clients = SharedClients::start(&config, &clock, &gateway.registry, &gateway.limits_changed)?;
        let live = gateway.shared_clients.as_ref().map(SharedClients::target);
        let (rule_set, limits_state) =
            gateway.limits_state.compile_rules(&mut config, live.as_deref(), counters.seed, None);
        limits_state.log(&gateway.limits_state);
        gateway.limits_state = limits_state;
        let now_ms = clock.wall_ms();
        let clients = gateway.shared_clients.as_mut().and_then(|shared| shared.live(&config, now_ms));
        let challenges = Arc::clone(&gateway.ordered_certificates.challenges);
        let live = LiveData { clients, published_keys, challenges, now_ms, ..LiveData::default() };
        let served = ServedConfig::new(config, counters.seed, rule_set, upstream_health, live);
        gateway.shared_deny.iter().for_each(|shared| shared.serve(&served));
        gateway.served = Some(Arc::clone(&served));
        gateway.outputs.marks = gateway.watch_marks(&served)?;
        gateway.serve_decisions(&served, clock.wall_ms());
        let (queries, query_inboxes) = (0..workers).map(|_| unbounded_channel()).unzip();
        gateway.history.lock().unwrap_or_else(PoisonError::into_inner).restore(&former.history);
        gateway.start_admin(queries, &mut inherited)?;
        gateway.unused_sockets = inherited.into_unused().map_err(StartError::Inherited)?;
        gateway.start_workers(opened.by_worker, query_inboxes, &served)?;
        // Started last, so that a failed start leaves the snapshot unchanged.
        let meter = SnapshotMetrics::new(&gateway.registry);
        let snapshot_writer = BackgroundWriter::start(counters, clock, &gateway.config.counters, meter);
        gateway.snapshot_writer = Some(snapshot_writer.map_err(StartError::Thread)?);
        Ok(gateway)
    }

    /// Starts a worker for each list of listeners. They do not accept yet.
    fn start_workers(
        &mut self,
        by_worker: Vec<Vec<WorkerListener>>,
        query_inboxes: Vec<UnboundedReceiver<TopKeysQuery>>,
        served: &Arc<ServedConfig>,
    ) -> Result<(), StartError> {
        for (id, (worker_listeners, queries)) in by_worker.into_iter().zip(query_inboxes).enumerate() {
            let worker_id = WorkerId::at(id);
            let (commands, inbox) = unbounded_channel();
            let shared_by_workers = self.shared_by_workers.clone();
            let (served, outputs) = (Arc::clone(served), self.outputs.clone());
            let (registry, listener_config) = (Arc::clone(&self.registry), Arc::clone(&self.listener_config));
            let (connection_limit, ready) = (Arc::clone(&self.connection_limit), self.ready.subscribe());
            let run = move || {
                let worker =
                    Rc::new(WorkerState::new(worker_id, shared_by_workers, Arc::clone(&registry), served, outputs));
                let listener_context = ListenerContext::new(worker, connection_limit, listener_config, ready);
                let listener_context = Rc::new(listener_context);
                let listeners = worker_listeners.into_iter().map(|worker_listener| {
                    let meter = ListenerMetrics::new(
                        &registry,
                        worker_id,
                        &worker_listener.address.to_string(),
                        worker_listener.tls.is_some(),
                    );
                    (
                        worker_listener.socket,
                        Rc::new(Listener::new(
                            Rc::clone(&listener_context),
                            meter,
                            worker_listener.tls,
                            worker_listener.protocol,
                        )),
                    )
                });
                worker::run(Rc::clone(&listener_context), listeners.collect(), inbox, queries)
            };
            self.worker_threads.push(spawn(format!("worker-{id}"), run)?);
            self.worker_commands.push(commands);
        }
        Ok(())
    }

    /// Accepts connections from now on.
    pub fn start_accepting(&mut self) {
        // The process that this one replaces leaves the files now.
        let files = self.sockets.iter_mut().chain(&mut self.unused_sockets).flat_map(|socket| &mut socket.file);
        files.for_each(|file| file.is_owned = true);
        self.unused_sockets.clear();
        self.send_to_workers(|| WorkerCommand::Accept);
        self.accept_state.send_replace(AcceptState::Accepting);
    }

    /// The listening sockets with their configured addresses.
    pub fn sockets(&self) -> &[OpenSocket] {
        &self.sockets
    }

    /// The descriptor of the counter memory, for an upgrade.
    pub fn counters(&self) -> BorrowedFd<'_> {
        self.counters.descriptor()
    }

    /// The key set that was fetched last, for an upgrade.
    pub fn key_set(&self) -> Option<KnownKeySet> {
        let KeySetThread { source, keys, .. } = self.key_set.as_ref()?;
        let KeySet { text, fetched_at_ms, .. } = keys.key_set()?;
        Some(KnownKeySet { url: source.url.clone(), text, fetched_at_ms })
    }

    /// The history of the dashboard, for an upgrade.
    pub fn history(&self) -> String {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).to_text()
    }

    fn send_to_workers(&self, order: impl Fn() -> WorkerCommand) {
        for commands in &self.worker_commands {
            // A worker that is gone has panicked, which is logged when joined.
            let _ = commands.send(order());
        }
    }

    /// The HTTP addresses, with the actual port where 0 is configured.
    pub fn http(&self) -> &[ListenAddress] {
        &self.http
    }

    /// As [`Gateway::http`], for HTTPS.
    pub fn https(&self) -> &[ListenAddress] {
        &self.https
    }

    /// As [`Gateway::http`], for the rate limit service.
    pub fn ratelimit_service(&self) -> &[ListenAddress] {
        &self.ratelimit_service
    }

    /// As [`Gateway::http`], for proxies that ask about requests.
    pub fn forward_auth(&self) -> &[ListenAddress] {
        &self.forward_auth
    }

    pub fn admin(&self) -> Option<&ListenAddress> {
        self.admin.as_ref()
    }

    /// As [`Gateway::http`], for the addresses that serve only metrics.
    pub fn metrics(&self) -> &[ListenAddress] {
        &self.metrics
    }

    /// What the thread `admin` counts by: as one more worker.
    fn admin_id(&self) -> WorkerId {
        WorkerId::at(self.workers)
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// The current configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Applies a new configuration. Connections and counts are kept; requests in flight finish under the old
    /// configuration.
    pub fn reload(&mut self, mut config: Config) -> Result<Applied, ReloadError> {
        let changed_workers = || (config.general.workers != self.config.general.workers).then_some("workers");
        let changed_buckets = || {
            (config.metrics.request_buckets != self.config.metrics.request_buckets).then_some("metrics.request_buckets")
        };
        let changed = config.listen.changed_address(&self.config.listen).or_else(changed_workers);
        let changed = changed.or_else(changed_buckets);
        let changed =
            changed.or_else(|| clients::changed_setting(config.clients.as_ref(), self.config.clients.as_ref()));
        if let Some(setting) = changed.or_else(|| config.counters.changed_setting(&self.config.counters)) {
            return Err(ReloadError::NeedsRestart(setting));
        }
        let live = self.shared_clients.as_ref().map(SharedClients::target);
        let former = self.served.as_ref().map(|served| &*served.rule_set);
        let (rule_set, limits_state) =
            self.limits_state.compile_rules(&mut config, live.as_deref(), self.counters.seed, former);
        if let Some(changed) = former.and_then(|former| rule_set.changed_counters(former)) {
            return Err(ReloadError::ChangedCounters(changed));
        }
        let changed_rules = former.map(|former| rule_set.changes_since(former));
        let live_certificates = self.ordered_certificates.live(&config.listen);
        let previous = Some((&self.config.listen, &*self.listener_config));
        let listener_config =
            ListenerConfig::new(&config.listen, &live_certificates, previous).map_err(ReloadError::Tls)?;
        audit_log::check(&config.admin).map_err(ReloadError::AuditLog)?;
        self.outputs = RecordOutputs {
            access_log: self.open_access_log(&config).map_err(ReloadError::AccessLog)?,
            spans: self.start_span_exporter(&config).map_err(ReloadError::Tracing)?,
            marks: None,
            log_throttle: Arc::clone(&self.outputs.log_throttle),
        };
        let published_keys = self.fetch_key_set(&config, None).map_err(ReloadError::KeySet)?;
        self.follow_shared_deny(&config).map_err(ReloadError::SharedDeny)?;
        self.ordered_certificates
            .use_orders(&config, live_certificates, &self.registry, &self.clock)
            .map_err(ReloadError::Acme)?;
        if let Some(keys) = &published_keys {
            // A gateway that serves stays ready.
            keys.set_tried();
        }
        for OpenSocket { address, socket, file } in &self.sockets {
            if let Err(error) = socket.listen(config.listen.backlog) {
                tracing::error!(%address, %error, "the backlog cannot be changed");
            }
            let configured = config.listen.sockets().find(|configured| configured.address == *address);
            if let (Some(file), Some(configured)) = (file, configured)
                && let Err(error) = file.set_permissions(configured.permissions)
            {
                tracing::error!(%address, %error, "the permissions of the socket cannot be changed");
            }
        }
        self.listener_config = listener_config;
        limits_state.log(&self.limits_state);
        self.limits_state = limits_state;
        if let Some(text) = changed_rules.as_ref().and_then(changed_rules_text) {
            tracing::info!("{text}");
        }
        // Metrics that the previous reload removed may be unused by now.
        self.registry.remove_unused();
        self.expiries = expiries(&self.registry, &config);
        self.connection_limit.apply(&config.listen);
        self.config = config.clone();
        self.admin_settings.send_replace(config.admin.clone());
        if let Err(error) = self.follow_services(&config) {
            tracing::error!(%error, "service records are not looked up");
        }
        let upstream_health = self.update_upstream_health(&config);
        if let Err(error) = self.start_health_checks(&upstream_health) {
            tracing::error!(%error, "upstream servers are not checked");
        }
        let now_ms = self.clock.wall_ms();
        let clients = self.shared_clients.as_mut().and_then(|shared| shared.live(&config, now_ms));
        let learnt = self.served.as_ref().map(|served| served.learnt_rules()).unwrap_or_default();
        let challenges = Arc::clone(&self.ordered_certificates.challenges);
        let live = LiveData { clients, published_keys, access: None, challenges, learnt, now_ms };
        let served = ServedConfig::new(config, self.counters.seed, rule_set, upstream_health, live);
        self.shared_deny.iter().for_each(|shared| shared.serve(&served));
        self.serve(&served, self.clock.wall_ms());
        let (pending, applied) = self.pending_reload();
        self.send_to_workers(|| WorkerCommand::Reload {
            served: Arc::clone(&served),
            listener_config: Arc::clone(&self.listener_config),
            outputs: self.outputs.clone(),
            pending: Arc::clone(&pending),
        });
        Ok(applied)
    }

    /// For the workers, which still use the rules before the current ones.
    fn pending_reload(&mut self) -> (Arc<PendingReload>, Applied) {
        let former_rules = self.shared_clients.as_mut().and_then(|shared| shared.former_rules.take());
        let (sender, applied) = tokio::sync::mpsc::channel(1);
        let decision_api = self.decision_api.clone();
        (Arc::new(PendingReload { former_rules, decision_api, _applied: sender }), Applied(applied))
    }

    /// Makes a configuration the current one, except in the workers. `loaded_ms`: when its file was loaded.
    fn serve(&mut self, served: &Arc<ServedConfig>, loaded_ms: u64) {
        self.served = Some(Arc::clone(served));
        match self.watch_marks(served) {
            Ok(marks) => self.outputs.marks = marks,
            Err(error) => tracing::error!(%error, "notifications are not sent"),
        }
        self.serve_decisions(served, loaded_ms);
    }

    /// What compiles the limits that clients of the store have now, in a thread that may block. `None`: the rules have them all.
    pub fn limits_compiler(&self) -> Option<impl FnOnce() -> CompiledLimits + Send + use<>> {
        let served = Arc::clone(self.served.as_ref()?);
        let is_ahead = served.clients.as_ref()?.current().is_ahead_of_rules();
        let (seed, state) = (self.counters.seed, self.limits_state.clone());
        is_ahead.then_some(move || CompiledLimits::new(served, state, seed))
    }

    /// Uses compiled limits, in the course of time also in the workers.
    pub fn use_limits(&mut self, compiled: CompiledLimits) {
        let CompiledLimits { former, served, state } = compiled;
        if !self.served.as_ref().is_some_and(|current| Arc::ptr_eq(current, &former)) {
            // A reload has compiled others.
            self.limits_changed.notify_one();
            return;
        }
        self.shared_clients.iter_mut().for_each(|shared| shared.use_rules(&served.config));
        state.log(&self.limits_state);
        self.limits_state = state;
        self.serve_changed(&served);
    }

    /// Uses the servers that service records list now, in the course of time also in the workers.
    pub fn use_services(&mut self) {
        let Some(served) = self.served.clone() else { return };
        // Those of servers before the last change may be unused by now.
        self.registry.remove_unused();
        let upstream_health = self.update_upstream_health(&served.config);
        self.serve_changed(&served.with_upstream_health(upstream_health));
    }

    /// Serves the current configuration with other limits of single clients, or other servers.
    fn serve_changed(&mut self, served: &Arc<ServedConfig>) {
        self.shared_deny.iter().for_each(|shared| shared.serve_unchanged(served));
        let loaded_ms = self.decision_api.borrow().as_ref().map_or(0, |decision_api| decision_api.loaded_ms);
        self.serve(served, loaded_ms);
        let (pending, _applied) = self.pending_reload();
        self.send_to_workers(|| WorkerCommand::ApplyLimits {
            served: Arc::clone(served),
            marks: self.outputs.marks.clone(),
            pending: Arc::clone(&pending),
        });
    }

    /// Is notified when clients of the store have limits that the rules do not know, see [`Gateway::limits_compiler`].
    pub fn limits_changed(&self) -> Arc<Notify> {
        Arc::clone(&self.limits_changed)
    }

    /// Is notified when service records list other servers, see [`Gateway::use_services`].
    pub fn services_changed(&self) -> Arc<Notify> {
        Arc::clone(&self.known_services.changed)
    }

    /// When limits of a client end, or earlier, Unix milliseconds.
    pub fn next_limit_end_ms(&self) -> Option<u64> {
        self.served.as_ref()?.clients.as_ref()?.current().next_limit_end_ms()
    }

    /// Ends the limits of clients that have reached their end.
    pub fn end_limits(&self) {
        let clients = self.served.iter().flat_map(|served| &served.clients);
        clients.for_each(|clients| clients.change(|plans| plans.apply_limits(self.clock.wall_ms())));
    }

    /// The changes of clients that requests to the admin address ask for; once.
    pub fn take_file_changes(&mut self) -> Option<UnboundedReceiver<FileChange>> {
        self.file_changes.take()
    }

    /// The edits of the access file that requests to the admin address have made; once.
    pub fn take_access_edits(&mut self) -> Option<UnboundedReceiver<AccessEdit>> {
        self.access_edits.take()
    }

    /// Logs when window time begins or ceases to differ from the wall clock. Call about once a second.
    pub fn compare_clocks(&mut self) {
        let offset_s = self.clock.offset_s();
        let is_off = offset_s.unsigned_abs() > CLOCK_OFFSET_MAX_S;
        match (std::mem::replace(&mut self.is_clock_off, is_off), is_off) {
            (false, true) => {
                let side = if offset_s < 0 { "behind" } else { "ahead of" };
                let seconds = offset_s.unsigned_abs();
                tracing::warn!(
                    "windows follow a clock that is {seconds} s {side} this machine's clock: the machine's clock was stepped, or the \
                     clock of the store is another; tokens and certificates are checked by the machine's"
                );
            }
            (true, false) => tracing::info!("windows follow this machine's clock again"),
            (true, true) | (false, false) => {}
        }
    }

    /// Reopens the access log after rotation.
    pub fn reopen_access_log(&self) {
        self.outputs.access_log.iter().for_each(LogSender::reopen);
    }

    /// Makes readiness fail. Connections are still accepted.
    pub fn begin_drain(&self) {
        self.ready.send_replace(false);
    }

    /// Stops accepting, lets requests finish within the configured limit, and returns when all threads have ended.
    /// Readiness fails first.
    pub fn drain(self) {
        self.begin_drain();
        let limit = self.config.timeouts.drain;
        self.shut_down(DrainTimes { idle: IDLE_DRAIN, limit, report: Duration::ZERO });
    }

    /// As [`Gateway::drain`], after an upgrade: another process accepts on the same sockets, so idle connections stay
    /// open almost until the limit. A request on one of them is served, and the client reconnects to the new process. The
    /// names of counters with usage that shared counters do not know are in this process only: it reports this usage before its
    /// end.
    pub fn drain_for_successor(mut self) {
        self.sockets.iter_mut().flat_map(|socket| &mut socket.file).for_each(|file| file.is_owned = false);
        self.accept_state.send_replace(AcceptState::HandedOver);
        let limit = self.config.timeouts.drain;
        let idle = limit - IDLE_CLOSE_MARGIN.min(limit / 2);
        self.shut_down(DrainTimes { idle, limit, report: REPORT_AFTER_UPGRADE });
    }

    /// Returns a function that makes a running drain close idle connections at once.
    pub fn idle_closer(&self) -> impl Fn() + use<> {
        let commands = self.worker_commands.clone();
        move || commands.iter().for_each(|commands| drop(commands.send(WorkerCommand::CloseIdle)))
    }

    fn shut_down(mut self, times: DrainTimes) {
        // Clients can connect to a socket as long as one of its descriptors is open. The files of Unix sockets are removed.
        self.sockets.clear();
        // The process that takes over orders from now on.
        std::mem::take(&mut self.ordered_certificates).finish();
        self.send_to_workers(|| WorkerCommand::Drain(times));
        for thread in self.worker_threads.drain(..) {
            join(thread);
        }
        // The health checks end when their sender is dropped.
        drop(self.upstream_health);
        self.health_thread.into_iter().for_each(join);
        if let Some(ServicesThread { sources, thread }) = self.services.take() {
            drop(sources);
            join(thread);
        }
        if let Some(KeySetThread { thread, stop, .. }) = self.key_set.take() {
            drop(stop);
            join(thread);
        }
        self.shared_deny.take().map(SharedDeny::stop).into_iter().for_each(join);
        self.accept_state.send_replace(AcceptState::Stopped);
        self.admin_thread.into_iter().for_each(join);
        self.shared_clients.into_iter().for_each(SharedClients::finish);
        // Nothing is counted from here on.
        self.snapshot_writer.take().into_iter().for_each(BackgroundWriter::finish);
        self.outputs = RecordOutputs::default();
        for writer in self.log_writers.drain(..) {
            writer.finish(LOG_FLUSH_TIMEOUT);
        }
        self.notifier = None;
        self.decision_api.send_replace(None);
        for exporter in self.span_exporters.drain(..) {
            exporter.finish(SPAN_FLUSH_TIMEOUT);
        }
        for notifier in self.notifier_threads.drain(..) {
            notifier.finish(NOTIFY_FLUSH_TIMEOUT);
        }
    }

    /// The access log of a configuration: the open one, if the settings are the same.
    fn open_access_log(&mut self, config: &Config) -> io::Result<Option<LogSender>> {
        let Some(log) = &config.access_log else { return Ok(None) };
        if self.outputs.access_log.is_some() && config.access_log == self.config.access_log {
            return Ok(self.outputs.access_log.clone());
        }
        let meter = AccessLogMetrics::new(&self.registry, self.log_writers.len());
        let (sender, writer) = LogSender::open(log, meter)?;
        self.log_writers.push(writer);
        Ok(Some(sender))
    }

    /// The exporter of spans of a configuration: the running one, if the receiver is the same.
    fn start_span_exporter(&mut self, config: &Config) -> io::Result<Option<SpanSender>> {
        let Some(Tracing { receiver, .. }) = &config.tracing else { return Ok(None) };
        let former = self.config.tracing.as_ref().map(|former| &former.receiver);
        if self.outputs.spans.is_some() && former == Some(receiver) {
            return Ok(self.outputs.spans.clone());
        }
        let metrics = SpanMetrics::new(&self.registry, self.span_exporters.len());
        let (sender, thread) = SpanSender::start(receiver.clone(), metrics)?;
        self.span_exporters.push(thread);
        Ok(Some(sender))
    }

    /// The marks of a configuration. Starts the thread that sends notifications, unless the running one has the same destination.
    fn watch_marks(&mut self, served: &ServedConfig) -> Result<Option<Arc<Marks>>, StartError> {
        let Some(settings) = &served.config.notify else {
            self.notifier = None;
            return Ok(None);
        };
        let store = served.config.counters.shared.clone();
        let destination = Destination { receiver: settings.receiver.clone(), store };
        let running = self.notifier.as_ref().filter(|notifier| notifier.destination == destination);
        let events = match running {
            Some(notifier) => notifier.events.clone(),
            None => {
                let metrics = NotifyMetrics::new(&self.registry, self.notifier_threads.len());
                let (sender, events) = EventSender::new(destination.clone(), metrics, self.clock.clone());
                self.notifier_threads.push(WriterThread(spawn("notify".to_owned(), || sender.run())?));
                self.notifier = Some(Notifier { destination, events: events.clone() });
                events
            }
        };
        let marks = Marks::new(settings, &served.rule_set, &self.sent_marks, events, self.started_ms);
        Ok(Some(Arc::new(marks)))
    }

    /// The upstream servers of a configuration with their known health; also published to the other threads.
    fn update_upstream_health(&self, config: &Config) -> Vec<Arc<UpstreamHealth>> {
        let former = self.upstream_health.borrow().clone();
        let service = |source: &ServiceSource| self.known_services.servers(source);
        let (registry, now) = (&self.registry, self.clock.instant());
        let upstream_health =
            server_health::build_upstream_health(config, service, &former, registry, self.workers, now);
        self.upstream_health.send_replace(upstream_health.clone());
        upstream_health
    }

    /// Follows the service records of a configuration, and waits a short time for the first answers.
    fn follow_services(&mut self, config: &Config) -> Result<(), StartError> {
        let source = |upstream: &Upstream| match &upstream.target {
            Target::Service(source) => Some(source.clone()),
            Target::Echo | Target::Servers(_) => None,
        };
        let sources: Vec<ServiceSource> = config.upstreams.iter().filter_map(source).collect();
        match &self.services {
            None if sources.is_empty() => return Ok(()),
            None => {
                let (sender, receiver) = watch::channel(sources.clone());
                let (known, registry) = (Arc::clone(&self.known_services), Arc::clone(&self.registry));
                let clock = self.clock.clone();
                let run = move || service_records::run(receiver, known, registry, clock);
                self.services = Some(ServicesThread { sources: sender, thread: spawn("services".to_owned(), run)? });
            }
            Some(running) => drop(running.sources.send_replace(sources.clone())),
        }
        self.known_services.wait_until_looked_up(&sources, FIRST_LOOK_UP);
        Ok(())
    }

    /// Starts the active health checks, if configured and not running.
    fn start_health_checks(&mut self, upstream_health: &[Arc<UpstreamHealth>]) -> Result<(), StartError> {
        if self.health_thread.is_none() && health_check::is_enabled(upstream_health) {
            let (upstream_health, clock) = (self.upstream_health.subscribe(), self.clock.clone());
            self.health_thread = Some(spawn("health".to_owned(), move || health_check::run(upstream_health, clock))?);
        }
        Ok(())
    }

    /// Starts to fetch the key set of a configuration, unless it is fetched already. The keys of the same URL stay in use.
    fn fetch_key_set(
        &mut self,
        config: &Config,
        known: Option<KnownKeySet>,
    ) -> Result<Option<Arc<PublishedKeys>>, StartError> {
        let Some(source) = &config.key_set else {
            self.key_set = None;
            return Ok(None);
        };
        if let Some(same) = self.key_set.as_ref().filter(|former| former.source == *source) {
            return Ok(Some(Arc::clone(&same.keys)));
        }
        let known = known.or_else(|| self.key_set()).filter(|known| known.url == source.url);
        let last = known.as_ref().map(|known| (&*known.text, known.fetched_at_ms));
        let metrics = KeySetMetrics::new(&self.registry, WorkerId::at(self.key_set_threads));
        let (fetcher, keys) = KeySetFetcher::new(source.clone(), last, metrics, self.clock.clone());
        let (stop, stopped) = oneshot::channel();
        let thread = spawn("key-set".to_owned(), move || fetcher.run(stopped))?;
        self.key_set_threads += 1;
        // Dropping the former one ends its thread.
        self.key_set = Some(KeySetThread { source: source.clone(), keys: Arc::clone(&keys), stop, thread });
        Ok(Some(keys))
    }

    /// Follows the deny entries that a configuration shares, unless the running thread does.
    fn follow_shared_deny(&mut self, config: &Config) -> Result<(), StartError> {
        if self.shared_deny.as_ref().is_some_and(|shared| shared.is_of(config)) {
            return Ok(());
        }
        let started = SharedDeny::start(config, &self.registry, &self.clock)?;
        self.shared_deny_map.send_replace(started.as_ref().map(|shared| shared.map.clone()));
        // The former one writes its last copy.
        std::mem::replace(&mut self.shared_deny, started).map(SharedDeny::stop).into_iter().for_each(join);
        Ok(())
    }

    /// Lets the decision API use a configuration.
    fn serve_decisions(&self, served: &Arc<ServedConfig>, loaded_ms: u64) {
        let metrics =
            DecisionMetrics::new(&self.registry, self.admin_id(), "api", &served.decision_service.limit_names());
        let marks = self.outputs.marks.as_ref();
        let marks = marks.map(|marks| MarkReader::new(marks, DroppedMarks::new(&self.registry, self.admin_id())));
        let shared_clients = self.shared_clients.as_ref().map(|shared| shared.data.clone());
        let decision_api = DecisionApi { served: Arc::clone(served), metrics, marks, loaded_ms, shared_clients };
        self.decision_api.send_replace(Some(Arc::new(decision_api)));
    }

    /// Opens an address of the admin thread, or takes its socket from `inherited`. Returns it with the bound address.
    fn open_admin(
        &mut self,
        configured: &ListenSocket,
        inherited: &mut InheritedSockets,
    ) -> Result<(Socket, ListenAddress), StartError> {
        let failed = |source| StartError::Listen { address: configured.address.clone(), source };
        let (open, bound) = open_one(configured, self.config.listen.backlog, inherited).map_err(failed)?;
        let socket = open.socket.try_clone().map_err(failed)?;
        self.sockets.push(open);
        Ok((socket, bound))
    }

    /// Where the API changes clients.
    fn client_store(&mut self) -> Box<dyn ClientStore + Send> {
        if let Some(shared) = &self.shared_clients {
            return Box::new(StoredClients {
                map: shared.data.map.clone(),
                decision_api: self.decision_api.subscribe(),
                deny: self.shared_deny_map.subscribe(),
                clock: self.clock.clone(),
                changing: tokio::sync::Mutex::default(),
            });
        }
        let (file_clients, file_changes) = FileClients::new();
        self.file_changes = Some(file_changes);
        Box::new(file_clients)
    }

    /// Serves `listen.admin` and `listen.metrics`, if one of them is configured.
    fn start_admin(
        &mut self,
        workers: Vec<UnboundedSender<TopKeysQuery>>,
        inherited: &mut InheritedSockets,
    ) -> Result<(), StartError> {
        let mut listeners = Vec::new();
        if let Some(configured) = self.config.listen.admin.clone() {
            let (listener, bound) = self.open_admin(&configured, inherited)?;
            self.admin = Some(bound);
            listeners.push((listener, AdminScope::Everything));
        }
        for configured in self.config.listen.metrics.clone() {
            let (listener, bound) = self.open_admin(&configured, inherited)?;
            self.metrics.push(bound);
            listeners.push((listener, AdminScope::Metrics));
        }
        if listeners.is_empty() {
            return Ok(());
        }
        let (registry, counters, clock) = (Arc::clone(&self.registry), Arc::clone(&self.counters), self.clock.clone());
        let (ready, accept_state) = (self.ready.subscribe(), self.accept_state.subscribe());
        let (decision_api, upstream_health) = (self.decision_api.subscribe(), self.upstream_health.subscribe());
        let (settings, history) = (self.admin_settings.subscribe(), Arc::clone(&self.history));
        let shared_deny = self.shared_deny_map.subscribe();
        // Only the decision API asks the store.
        let store = self.config.counters.shared.clone().filter(|_| self.admin.is_some());
        let owner = self.admin_id();
        let client_store = self.client_store();
        let (access_edits, received) = unbounded_channel();
        self.access_edits = Some(received);
        let shared_by_workers = self.shared_by_workers.clone();
        let log_throttle = Arc::clone(&self.outputs.log_throttle);
        let run = move || async move {
            let meter = || StoreMetrics::new(&registry, owner);
            let of_workers = shared_by_workers.clone();
            let shared = store.map(|store| SharedCounters::new(&store, of_workers, meter()));
            shared.iter().for_each(|shared| drop(spawn_local(Rc::clone(shared).run())));
            let metrics = AdminMetrics::new(&registry, owner);
            let admin_state = AdminState {
                counter_access: CounterAccess::new(shared_by_workers, shared),
                registry,
                counters,
                clock,
                ready,
                accept_state,
                settings,
                log_throttle,
                decision_api,
                access_edits,
                access_file_lock: Arc::default(),
                shared_deny,
                upstream_health,
                workers,
                top_keys: RefCell::default(),
                metrics,
                events: Events::new(history),
                client_store,
            };
            if let Err(error) = admin::serve(listeners, Rc::new(admin_state)).await {
                tracing::error!(%error, "the admin address is no longer served");
            }
        };
        self.admin_thread = Some(spawn("admin".to_owned(), run)?);
        Ok(())
    }
}

/// The message about rules that a reload changes; `None` if it changes none.
fn changed_rules_text(RuleChanges { added, removed, recounted }: &RuleChanges) -> Option<String> {
    let parts = [("added", added), ("removed", removed), ("with another key or window", recounted)];
    let parts = parts.into_iter().filter(|(_, names)| !names.is_empty());
    let parts: Vec<String> = parts.map(|(what, names)| format!("{what}: `{}`", names.join("`, `"))).collect();
    let begin = if added.is_empty() && recounted.is_empty() {
        ""
    } else {
        "; counts are not carried over to another name, key or window"
    };
    (!parts.is_empty()).then(|| format!("rules {}{begin}", parts.join("; ")))
}

/// The expiry metrics of certificates and revocation lists.
fn expiries(registry: &Registry, config: &Config) -> ExpiryGauges {
    let certificates = config.listen.tls_listeners().flat_map(|https| &https.certificates);
    let certificates = certificates.map(|certificate| (certificate.file.as_str(), certificate.not_after_s));
    let lists = lint::revocation_lists(config).map(|list| (list.file.as_str(), list.next_update_s));
    ExpiryGauges::new(registry, certificates, lists)
}

/// Starts a thread with its own runtime; returns once the runtime is built.
fn spawn<F, R>(name: String, run: F) -> Result<JoinHandle<()>, StartError>
where
    F: FnOnce() -> R + Send + 'static,
    R: Future<Output = ()>,
{
    let (started, start_result) = mpsc::sync_channel(1);
    let body = move || match Builder::new_current_thread().enable_all().build_local(LocalOptions::default()) {
        Ok(runtime) => {
            // The starting thread waits below.
            let _ = started.send(Ok(()));
            // Called within the future, so that it runs inside the runtime.
            runtime.block_on(async { run().await });
            // A pending name lookup is not waited for.
            runtime.shutdown_background();
        }
        Err(error) => drop(started.send(Err(error))),
    };
    let thread = thread::Builder::new().name(name).spawn(body).map_err(StartError::Thread)?;
    let result = start_result.recv().unwrap_or_else(|_gone| Err(io::Error::other("the thread ended at once")));
    result.map(|()| thread).map_err(StartError::Thread)
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("a thread of the gateway panicked");
    }
}
