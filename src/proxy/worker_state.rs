//! What one worker keeps between requests and across reloads.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use http::HeaderValue;
use tokio::sync::mpsc::UnboundedSender;

use super::log_throttle::LogThrottle;
use super::worker_config::{RecordOutputs, WorkerConfig};
use crate::notify::Marks;
use crate::proxy::served_config::ServedConfig;
use crate::timer::Timers;
use transom_http::error::{ErrorKindId, RequestError};
use transom_rules::RouteRulesId;
use transom_rules::compiled_config::RouteRules;
use transom_rules::responses::Date;
use transom_rules::top_keys::{KeyOutcome, ListedKey, Snapshot};
use transom_runtime::clock::Clock;
use transom_runtime::metrics::events::WorkerMetrics;
use transom_runtime::metrics::redis::StoreMetrics;
use transom_runtime::metrics::{Registry, WorkerId};
use transom_store::counter_access::CounterAccess;
use transom_store::shared_counters::{SharedByWorkers, SharedCounters};

/// Asks a worker for what it counted of keys. Rules are named by their hash prefixes.
#[derive(Clone)]
pub enum TopKeysQuery {
    /// Copies of the counts. The worker sends the position in `rules` with each copy.
    List { outcome: KeyOutcome, rules: Arc<[u64]>, reply: UnboundedSender<(usize, Snapshot)> },
    /// The key with an id: see [`TopKeys::find`](transom_rules::top_keys::TopKeys::find).
    Find { rule: u64, id: u64, config_number: u64, reply: UnboundedSender<Arc<ListedKey>> },
}

pub struct WorkerState {
    pub counters: CounterAccess,
    pub clock: Clock,
    pub metrics: WorkerMetrics<ErrorKindId>,
    pub timers: Rc<Timers>,
    pub log_throttle: Arc<LogThrottle>,
    /// End time of the requests that end in one batch, so that the clock is read once for all of them.
    batch_end: Cell<Option<Instant>>,
    pub worker_id: WorkerId,
    pub registry: Arc<Registry>,
    /// The `Date` of responses, and the timer tick at which it was last computed.
    date: RefCell<(Option<u64>, Date)>,
    config: RefCell<Rc<WorkerConfig>>,
}

/// Who decided a request, and will settle it: a worker with its configuration, by the rules of a route.
#[derive(Clone, Copy)]
pub struct DecidedBy<'a> {
    pub worker: &'a Rc<WorkerState>,
    pub config: &'a Rc<WorkerConfig>,
    pub rules_id: RouteRulesId,
    /// Whether the request may wait for a reachable server, which then charges nothing if there is none in time.
    pub may_hold: bool,
}

impl<'a> DecidedBy<'a> {
    pub fn rules(self) -> &'a RouteRules {
        &self.config.served.route_rules[self.rules_id]
    }
}

impl WorkerState {
    pub fn new(
        worker_id: WorkerId,
        shared_by_workers: SharedByWorkers,
        registry: Arc<Registry>,
        served: Arc<ServedConfig>,
        outputs: RecordOutputs,
    ) -> WorkerState {
        let clock = shared_by_workers.clock.clone();
        let settings = served.config.counters.shared.as_ref();
        let shared = settings.map(|settings| {
            let metrics = StoreMetrics::new(&registry, worker_id);
            SharedCounters::new(settings, shared_by_workers.clone(), metrics)
        });
        let log_throttle = Arc::clone(&outputs.log_throttle);
        let config = WorkerConfig::new(worker_id, &registry, &clock, served, outputs, None);
        WorkerState {
            counters: CounterAccess::new(shared_by_workers, shared),
            metrics: WorkerMetrics::new(&registry, worker_id, RequestError::kind_names()),
            timers: Rc::default(),
            log_throttle,
            date: RefCell::default(),
            batch_end: Cell::default(),
            config: RefCell::new(Rc::new(config)),
            clock,
            worker_id,
            registry,
        }
    }

    /// Gives all requests that end during `end_requests` the same end time.
    pub fn share_end_time(&self, end_requests: impl FnOnce()) {
        /// Clears the shared end time, also after a panic.
        struct ClearOnDrop<'a>(&'a Cell<Option<Instant>>);
        impl Drop for ClearOnDrop<'_> {
            fn drop(&mut self) {
                self.0.set(None);
            }
        }
        self.batch_end.set(Some(self.clock.instant()));
        let clear = ClearOnDrop(&self.batch_end);
        end_requests();
        drop(clear);
    }

    /// The end time of a request that ends now.
    pub fn end_time(&self) -> Instant {
        self.batch_end.get().unwrap_or_else(|| self.clock.instant())
    }

    pub fn config(&self) -> Rc<WorkerConfig> {
        Rc::clone(&self.config.borrow())
    }

    /// The `Date` of responses. It is recomputed once per timer tick, ten times a second: `Date` has seconds only.
    pub fn date(&self) -> HeaderValue {
        let (computed_at, date) = &mut *self.date.borrow_mut();
        let tick = Some(self.timers.tick());
        if std::mem::replace(computed_at, tick) != tick {
            date.update(self.clock.wall_ms());
        }
        date.value()
    }

    /// Switches new requests to a configuration. Connections to unchanged servers stay open.
    pub fn apply_config(&self, served: Arc<ServedConfig>, outputs: RecordOutputs) {
        let previous = self.config();
        let (id, registry, clock) = (self.worker_id, &self.registry, &self.clock);
        let config = WorkerConfig::new(id, registry, clock, served, outputs, Some(&previous));
        previous.upstreams.retire_servers(&config.upstreams);
        *self.config.borrow_mut() = Rc::new(config);
    }

    /// Switches new requests to the same configuration with other limits of single clients or other servers.
    pub fn apply_limits(&self, served: Arc<ServedConfig>, marks: Option<&Arc<Marks>>) {
        let previous = self.config();
        let config = previous.with_limits(self.worker_id, &self.registry, &self.clock, served, marks);
        previous.upstreams.retire_servers(&config.upstreams);
        *self.config.borrow_mut() = Rc::new(config);
    }

    /// Sends copies of the counts of keys, or a key. Requests are served between the rules.
    pub async fn answer_top_keys(&self, query: TopKeysQuery) {
        match query {
            TopKeysQuery::List { outcome, rules, reply } => {
                for (position, hash_prefix) in rules.iter().enumerate() {
                    let now_ms = self.clock.now().unix_ms;
                    let snapshot = self.config().top_keys.snapshot(*hash_prefix, outcome, now_ms);
                    if snapshot.is_some_and(|snapshot| reply.send((position, snapshot)).is_err()) {
                        break;
                    }
                    tokio::task::yield_now().await;
                }
            }
            TopKeysQuery::Find { rule, id, config_number, reply } => {
                let now_ms = self.clock.now().unix_ms;
                let found = self.config().top_keys.find(rule, id, config_number, now_ms);
                // The receiver may have given up.
                let _ = found.map(|key| reply.send(key));
            }
        }
    }

    /// Closes idle upstream connections, refunds what requests left charged that were canceled while delayed, and begins new
    /// periods of the counts of keys.
    pub fn sweep(&self) {
        self.config().top_keys.begin_period(self.clock.now().unix_ms);
        self.counters.sweep_refunds();
        self.config().close_idle_connections();
    }
}
