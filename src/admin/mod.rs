//! The admin address: the dashboard and its events, `/metrics`, `/upstreams`, `/healthz`, `/readyz`, and the API under `/v1/`.
//! The addresses of `listen.metrics` serve a part of it. `endpoints` is the table of all that is served.
//!
//! Runs on its own thread, so that a scrape takes no time from requests. Accepts only IP addresses, `localhost` and configured
//! names as host, which stops DNS rebinding: a web page whose name resolves to this address could read the responses in a
//! browser. `write_timeout` ends connections with a peer that does not read.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use socket2::Socket;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Mutex, Semaphore, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::downstream::listener::Acceptor;
use crate::notify::MarkReader;
use crate::persistence::counters::Counters;
use crate::proxy::log_throttle::{LogThrottle, handle_accept_error};
use crate::proxy::served_config::ServedConfig;
use crate::proxy::worker_state::TopKeysQuery;
use crate::shared_data::SharedDataHandle;
use crate::upstream::server_health::UpstreamHealth;
use transom_config::listen::Admin;
use transom_rules::responses::{self, LocalResponse};
use transom_rules::top_keys::TopKeys;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::Registry;
use transom_runtime::metrics::events::{AdminMetrics, DecisionMetrics};
use transom_store::counter_access::CounterAccess;
use transom_store::map_follower::SharedMap;

mod accepted;
pub mod audit_log;
mod authorization;
pub mod client_changes;
pub mod client_grants;
pub mod client_limits;
pub mod client_store;
pub mod clients;
mod dashboard;
mod decision_json;
mod decisions;
mod deny;
mod endpoints;
pub mod events;
pub mod history;
mod json_objects;
mod json_schema;
mod metrics_page;
mod openapi;
mod top_query;
mod write_timeout;

use client_store::ClientStore;
use events::{EventBody, Events};
use write_timeout::WriteTimeout;

/// Concurrent connections; further ones are closed at once.
const CONNECTIONS_MAX: usize = 256;
/// How long a peer may leave a response unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// For responses under way when the process ends.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// For the head of a request, for a query, and between requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Whether the admin address accepts connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AcceptState {
    /// Not yet: the process is starting.
    NotStarted,
    Accepting,
    /// Another process has taken over the listener; responses on open connections close them.
    HandedOver,
    /// No longer: the process ends as soon as responses under way are finished.
    Stopped,
}

impl AcceptState {
    /// Whether streams of events end, and responses close their connection.
    fn is_over(self) -> bool {
        matches!(self, AcceptState::HandedOver | AcceptState::Stopped)
    }
}

/// An edit of the access file is complete: to be answered with whether it is in effect in all workers.
pub type AccessEdit = oneshot::Sender<bool>;

/// What an address serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AdminScope {
    Everything,
    /// `GET /metrics` and the health pages only.
    Metrics,
}

/// What the decision API uses under one configuration.
pub struct DecisionApi {
    pub served: Arc<ServedConfig>,
    pub metrics: DecisionMetrics,
    /// With `[notify]`.
    pub marks: Option<MarkReader>,
    /// When the configuration was applied, Unix milliseconds.
    pub loaded_ms: u64,
    /// The clients, if they are in the store.
    pub shared_clients: Option<SharedDataHandle>,
}

/// What the admin pages read.
pub struct AdminState {
    pub registry: Arc<Registry>,
    pub counters: Arc<Counters>,
    pub clock: Clock,
    /// Readiness. Becomes `false` first when the gateway drains.
    pub ready: watch::Receiver<bool>,
    pub accept_state: watch::Receiver<AcceptState>,
    pub settings: watch::Receiver<Admin>,
    pub log_throttle: Arc<LogThrottle>,
    /// `None` until the first configuration is applied.
    pub decision_api: watch::Receiver<Option<Arc<DecisionApi>>>,
    /// To the thread that applies configurations.
    pub access_edits: UnboundedSender<AccessEdit>,
    /// Held while the access file is edited.
    pub access_file_lock: Arc<Mutex<()>>,
    /// The deny entries of the store, if they are shared.
    pub shared_deny: watch::Receiver<Option<SharedMap>>,
    pub upstream_health: watch::Receiver<Vec<Arc<UpstreamHealth>>>,
    pub counter_access: CounterAccess,
    pub workers: Vec<UnboundedSender<TopKeysQuery>>,
    /// The keys of the decision API, and the configuration whose rules they are of.
    pub top_keys: RefCell<Option<(Arc<ServedConfig>, Rc<TopKeys>)>>,
    pub metrics: AdminMetrics,
    pub events: Events,
    pub client_store: Box<dyn ClientStore>,
}

/// The body of a response.
type AdminBody = Either<Full<Bytes>, EventBody>;

impl AdminState {
    /// The keys of the decision API, by the rules of a configuration.
    fn top_keys(&self, served: &Arc<ServedConfig>) -> Rc<TopKeys> {
        let mut current = self.top_keys.borrow_mut();
        match &*current {
            Some((known, top_keys)) if Arc::ptr_eq(known, served) => Rc::clone(top_keys),
            former => {
                let former = former.as_ref().map(|(_, top_keys)| &**top_keys);
                let top_keys = Rc::new(TopKeys::new(&served.counted_rules(), self.clock.now().unix_ms, former));
                *current = Some((Arc::clone(served), Rc::clone(&top_keys)));
                top_keys
            }
        }
    }

    /// Sends a query to all workers. One that has ended has no counts.
    fn ask_workers(&self, query: TopKeysQuery) {
        self.workers.iter().for_each(|worker| _ = worker.send(query.clone()));
    }

    /// Whether requests can be served, or why not.
    fn readiness(&self) -> Result<(), &'static str> {
        let decision_api = self.decision_api.borrow().clone();
        let knows_clients = |api: &DecisionApi| api.shared_clients.as_ref().is_none_or(SharedDataHandle::is_known);
        match decision_api {
            _ if self.is_draining() => Err("draining\n"),
            Some(api) if !api.served.was_key_set_tried() => Err("the key set of `[jwt]` is being fetched\n"),
            Some(api) if !knows_clients(&api) => Err("the shared clients are not known yet\n"),
            _ => Ok(()),
        }
    }

    /// The response of `/readyz`.
    fn readiness_response(&self) -> LocalResponse {
        match self.readiness() {
            Ok(()) => responses::text_response("ready\n".to_owned()),
            Err(why) => responses::not_ready_response(why.to_owned()),
        }
    }

    /// Decisions by overflow counters.
    fn overflow_total(&self) -> u64 {
        let table = &self.counters.table;
        let decision_api = self.decision_api.borrow();
        let concurrency = decision_api.as_ref().map_or(0, |api| api.served.rule_set.concurrency.overflows_total());
        table.overflow_charges_total() + table.overflow_refused_total() + concurrency
    }

    fn is_draining(&self) -> bool {
        !*self.ready.borrow()
    }
}

/// Serves the admin pages until the gateway stops.
pub async fn serve(listeners: Vec<(Socket, AdminScope)>, state: Rc<AdminState>) -> std::io::Result<()> {
    let mut accept_state = state.accept_state.clone();
    if accept_state.wait_for(|accept_state| *accept_state != AcceptState::NotStarted).await.is_err() {
        return Ok(());
    }
    tokio::task::spawn_local(events::run(Rc::clone(&state)));
    let connections = Rc::new(GracefulShutdown::new());
    let mut accepting = JoinSet::new();
    for (listener, scope) in listeners {
        let listener = Acceptor::new(listener)?;
        accepting.spawn_local(accept_connections(listener, scope, Rc::clone(&state), Rc::clone(&connections)));
    }
    accepting.join_all().await;
    // Only now, so that this process accepts no reader of a stream that connects again.
    state.events.end();
    // Fails if the gateway was dropped.
    let _ = accept_state.wait_for(|accept_state| *accept_state == AcceptState::Stopped).await;
    if let Some(connections) = Rc::into_inner(connections) {
        let _ = timeout(STOP_TIMEOUT, connections.shutdown()).await;
    }
    Ok(())
}

/// Accepts connections until another process has taken over, or the gateway stops. Each address has its own limit of
/// connections.
async fn accept_connections(
    listener: Acceptor,
    scope: AdminScope,
    state: Rc<AdminState>,
    connections: Rc<GracefulShutdown>,
) {
    let mut accept_state = state.accept_state.clone();
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = accept_state.wait_for(|accept_state| accept_state.is_over()) => return,
        };
        match accepted {
            Ok(stream) => {
                let permit = Arc::clone(&permits).try_acquire_owned();
                let Ok(permit) = permit else {
                    state.metrics.connection_refused();
                    let message = "an admin or metrics address has its maximum of connections; further ones are closed";
                    if let Some(suppressed) = state.log_throttle.allow(message, state.clock.instant()) {
                        tracing::warn!(maximum = CONNECTIONS_MAX, suppressed, "{message}");
                    }
                    continue;
                };
                let (state, on_error) = (Rc::clone(&state), Rc::clone(&state));
                let service = service_fn(move |request| endpoints::handle(Rc::clone(&state), scope, request));
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_TIMEOUT)
                    .serve_connection(TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT)), service);
                let connection = connections.watch(connection);
                tokio::task::spawn_local(async move {
                    // A peer that closes the connection is no error.
                    if let Some(code) = connection.await.err().and_then(|error| parser_status(&error)) {
                        on_error.metrics.responded(endpoints::OTHER_PATHS, code);
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                let message = "accepting connections of an admin or metrics address failed; retrying";
                handle_accept_error(error, message, &state.log_throttle, &state.clock).await;
            }
        }
    }
}

/// The status with which hyper has answered a head that it cannot parse.
fn parser_status(error: &hyper::Error) -> Option<u16> {
    match () {
        () if !error.is_parse() || error.is_parse_version_h2() => None,
        () if !error.is_parse_too_large() => Some(400),
        () if error.to_string().contains("URI") => Some(414),
        () => Some(431),
    }
}

/// The state of all upstream servers.
fn upstreams(state: &AdminState) -> serde_json::Value {
    let now = state.clock.instant();
    let upstream_health = state.upstream_health.borrow();
    let upstream_health = upstream_health.iter().filter(|upstream_health| !upstream_health.servers.is_empty());
    serde_json::json!({ "upstreams": upstream_health.map(|upstream_health| upstream_health.to_json(now)).collect::<Vec<_>>() })
}
