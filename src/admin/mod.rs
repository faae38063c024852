//! The admin address: the dashboard and its events, `/metrics`, `/upstreams`, `/healthz`, `/readyz`, the busiest keys, and
//! the decision API under `/v1/`. The addresses of `listen.metrics` serve a part of these pages.
//!
//! Runs on its own thread, so that a scrape takes no time from requests. Accepts only IP addresses, `localhost` and configured
//! names as host, which stops DNS rebinding: a web page whose name resolves to this address could read the responses in a
//! browser. `write_timeout` ends connections with a peer that does not read.

use std::cell::RefCell;
use std::convert::Infallible;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener as StdListener};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONNECTION, HOST, HeaderMap, HeaderName, ORIGIN};
use http::uri::Authority;
use http::{HeaderValue, Method, Request, Response};
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::decision::{DecisionOutputs, Operation, QueryKey, RuleQuery};
use crate::explain;
use crate::explain::question::Question;
use crate::notify::MarkReader;
use crate::persistence::counters::Counters;
use crate::proxy::served_config::ServedConfig;
use crate::proxy::worker_state::TopKeysQuery;
use crate::upstream::server_health::UpstreamHealth;
use transom_config::listen::Admin;
use transom_http::error::{DecisionError, RequestError};
use transom_rules::responses::{self, LocalResponse};
use transom_rules::top_keys::TopKeys;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::Registry;
use transom_runtime::metrics::events::{AdminMetrics, DecisionMetrics};
use transom_store::counter_access::CounterAccess;

mod accepted;
mod clients;
mod dashboard;
mod decision_json;
pub mod events;
pub mod history;
mod metrics_page;
mod top_query;
mod write_timeout;

use events::{EventBody, Events};
use top_query::TopQuery;
use write_timeout::WriteTimeout;

/// Concurrent connections; further ones are closed at once.
const CONNECTIONS_MAX: usize = 256;
/// How long a peer may leave a response unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// For responses under way when the process ends.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// For the head of a request, for a query, and between requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// All that the addresses of `listen.metrics` serve. Nothing of it changes the gateway, or names a key.
const METRICS_PAGES: [&str; 3] = ["/metrics", "/healthz", "/readyz"];
/// The pages that [`handle_page`] serves.
const PAGES: [&str; 5] = ["/", "/metrics", "/upstreams", "/healthz", "/readyz"];
/// Paths that are counted by name; all others are counted as `other`.
const ENDPOINTS: [&str; 13] = [
    "/",
    "/metrics",
    "/upstreams",
    "/healthz",
    "/readyz",
    "/v1/limit",
    "/v1/check",
    "/v1/reset",
    "/v1/value",
    "/v1/explain",
    "/v1/top",
    "/v1/events",
    "/v1/clients",
];
/// Counted for all paths of clients.
const CLIENT_ENDPOINT: &str = "/v1/clients/{name}";
const OTHER_ENDPOINT: &str = "other";
const QUERY_MAX_BYTES: usize = 64 * 1024;

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
    /// `None` until the first configuration is applied.
    pub decision_api: watch::Receiver<Option<Arc<DecisionApi>>>,
    pub upstream_health: watch::Receiver<Vec<Arc<UpstreamHealth>>>,
    pub counter_access: CounterAccess,
    pub workers: Vec<UnboundedSender<TopKeysQuery>>,
    /// The keys of the decision API, and the configuration whose rules they are of.
    pub top_keys: RefCell<Option<(Arc<ServedConfig>, Rc<TopKeys>)>>,
    pub metrics: AdminMetrics,
    pub events: Events,
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
        let served = self.decision_api.borrow().as_ref().map(|api| Arc::clone(&api.served));
        match served {
            _ if self.is_draining() => Err("draining\n"),
            Some(served) if !served.was_key_set_tried() => Err("the key set of `[jwt]` is being fetched\n"),
            _ => Ok(()),
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
pub async fn serve(listeners: Vec<(StdListener, AdminScope)>, state: Rc<AdminState>) -> std::io::Result<()> {
    let mut accept_state = state.accept_state.clone();
    if accept_state.wait_for(|accept_state| *accept_state != AcceptState::NotStarted).await.is_err() {
        return Ok(());
    }
    tokio::task::spawn_local(events::run(Rc::clone(&state)));
    let connections = Rc::new(GracefulShutdown::new());
    let mut accepting = JoinSet::new();
    for (listener, scope) in listeners {
        let listener = TcpListener::from_std(listener)?;
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
    listener: TcpListener,
    scope: AdminScope,
    state: Rc<AdminState>,
    connections: Rc<GracefulShutdown>,
) {
    let mut accept_state = state.accept_state.clone();
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut is_full = false;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = accept_state.wait_for(|accept_state| accept_state.is_over()) => return,
        };
        match accepted {
            Ok((stream, _peer)) => {
                let permit = Arc::clone(&permits).try_acquire_owned();
                let Ok(permit) = permit else {
                    state.metrics.connection_refused();
                    if !is_full {
                        tracing::warn!("the admin address has {CONNECTIONS_MAX} connections; further ones are closed");
                    }
                    is_full = true;
                    continue;
                };
                is_full = false;
                let (state, on_error) = (Rc::clone(&state), Rc::clone(&state));
                let service = service_fn(move |request| handle(Rc::clone(&state), scope, request));
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_TIMEOUT)
                    .serve_connection(TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT)), service);
                let connection = connections.watch(connection);
                tokio::task::spawn_local(async move {
                    // A peer that closes the connection is no error.
                    if let Some(code) = connection.await.err().and_then(|error| parser_status(&error)) {
                        on_error.metrics.responded(OTHER_ENDPOINT, code);
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the admin address cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
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

/// Responds, and counts the response.
async fn handle(
    state: Rc<AdminState>,
    scope: AdminScope,
    request: Request<Incoming>,
) -> Result<Response<AdminBody>, Infallible> {
    let path = request.uri().path();
    let client = clients::name_in(path).map(|_name| CLIENT_ENDPOINT);
    let endpoint = ENDPOINTS.into_iter().find(|endpoint| *endpoint == path).or(client).unwrap_or(OTHER_ENDPOINT);
    let response = respond(Rc::clone(&state), scope, request).await?;
    state.metrics.responded(endpoint, response.status().as_u16());
    Ok(response)
}

async fn respond(
    state: Rc<AdminState>,
    scope: AdminScope,
    request: Request<Incoming>,
) -> Result<Response<AdminBody>, Infallible> {
    let refusal = check_access(&request, scope, &state.settings.borrow()).err();
    if let Some(error) = refusal {
        return Ok(finish_response(&state, responses::decision_error_response(&error)));
    }
    let call = match request.uri().path() {
        path if scope == AdminScope::Metrics && !METRICS_PAGES.contains(&path) => {
            return Ok(finish_response(&state, responses::error_response(&RequestError::NoRoute)));
        }
        "/v1/limit" => ApiCall::Decide(Operation::Limit),
        "/v1/check" => ApiCall::Decide(Operation::Check),
        "/v1/reset" => ApiCall::Decide(Operation::Reset),
        "/v1/value" => ApiCall::Decide(Operation::Value),
        "/v1/explain" => ApiCall::Explain,
        "/v1/top" => {
            let reply = match refuse_method(&request) {
                None => busiest_keys(&state, request.uri().query().unwrap_or_default()).await,
                Some(reply) => reply,
            };
            return Ok(finish_response(&state, reply));
        }
        "/v1/events" => return Ok(open_events(&state, &request)),
        path if path == "/v1/clients" || clients::name_in(path).is_some() => {
            let reply = match refuse_method(&request) {
                None => clients::response(&state, request.uri()).await,
                Some(reply) => reply,
            };
            return Ok(finish_response(&state, reply));
        }
        _ => return Ok(finish_response(&state, handle_page(&state, &request))),
    };
    let response = call_api(&state, call, request).await;
    Ok(finish_response(&state, response))
}

/// `GET /v1/events`. A page of another origin could not read the events, but could use up all streams.
fn open_events(state: &Rc<AdminState>, request: &Request<Incoming>) -> Response<AdminBody> {
    if let Some(reply) = refuse_method(request) {
        return finish_response(state, reply);
    }
    if request.method() == Method::HEAD {
        return finish_response(state, responses::event_stream_head());
    }
    let opened = match is_cross_origin(request.headers()) {
        true => Err(DecisionError::CrossOrigin),
        false => events::open(state),
    };
    match opened {
        Ok(body) => responses::event_stream_head().map(|_empty| Either::Right(body)),
        Err(error) => finish_response(state, responses::decision_error_response(&error)),
    }
}

/// What a request to the decision API asks for.
enum ApiCall {
    Decide(Operation),
    Explain,
}

/// Closes the connection after this response if another process has taken over.
fn finish_response(state: &AdminState, mut reply: LocalResponse) -> Response<AdminBody> {
    if state.accept_state.borrow().is_over() {
        reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    reply.map(|body| Either::Left(Full::new(body)))
}

/// Handles a request to the decision API.
async fn call_api(state: &AdminState, call: ApiCall, request: Request<Incoming>) -> LocalResponse {
    if request.method() != Method::POST {
        let mut reply = responses::error_response(&RequestError::Method);
        reply.headers_mut().insert(http::header::ALLOW, http::HeaderValue::from_static("POST"));
        return reply;
    }
    if is_cross_origin(request.headers()) {
        return responses::decision_error_response(&DecisionError::CrossOrigin);
    }
    let wants_text =
        request.headers().get(ACCEPT).is_some_and(|accepted| accepted.as_bytes().starts_with(b"text/plain"));
    let body = Limited::new(request.into_body(), QUERY_MAX_BYTES).collect();
    let text = match tokio::time::timeout(HEAD_TIMEOUT, body).await {
        Ok(Ok(text)) => text.to_bytes(),
        Ok(Err(_too_long_or_broken)) => return responses::decision_error_response(&DecisionError::TooLarge),
        Err(_elapsed) => return responses::decision_error_response(&DecisionError::Timeout),
    };
    let decision_api = state.decision_api.borrow().clone();
    // Not reached: it is set before the listener accepts.
    let Some(decision_api) = decision_api else { return responses::not_ready_response(String::from("starting\n")) };
    let response = match call {
        ApiCall::Decide(operation) => decide(state, &decision_api, operation, &text).await,
        ApiCall::Explain => explain(state, &decision_api.served, &text, wants_text).await,
    };
    response.unwrap_or_else(|error| responses::decision_error_response(&error))
}

async fn decide(
    state: &AdminState,
    decision_api: &DecisionApi,
    operation: Operation,
    text: &[u8],
) -> Result<LocalResponse, DecisionError> {
    let (mut query, id) = decision_json::parse(operation, text)?;
    if let (Some(id), [RuleQuery { rule, key, .. }]) = (id, &mut query.rules[..]) {
        *key = QueryKey::Listed(top_query::find(state, &decision_api.served, rule, id).await?);
    }
    decision_api.served.decision_service.name_clients(&mut query)?;
    let DecisionApi { served, metrics, marks } = decision_api;
    let (top_keys, readable_digester) = (&*state.top_keys(served), &*served.readable_digester);
    let outputs = DecisionOutputs { metrics, top_keys, marks: marks.as_ref(), readable_digester };
    let outcome = served.decision_service.decide(&query, &state.counter_access, outputs).await?;
    Ok(responses::json_response(format!("{}\n", decision_json::render(&query, &outcome))))
}

/// `POST /v1/explain`: JSON, or the text that `transom explain` prints.
async fn explain(
    state: &AdminState,
    served: &ServedConfig,
    text: &[u8],
    wants_text: bool,
) -> Result<LocalResponse, DecisionError> {
    let question = Question::from_json(text).map_err(DecisionError::Malformed)?;
    let explanation = explain::explain(served, &question, &state.counter_access, true).await?;
    Ok(match wants_text {
        true => responses::text_response(explanation.to_string()),
        false => responses::json_response(format!("{}\n", explanation.to_json())),
    })
}

/// Every request must name a host of the admin address, and a `POST` the token, if there is one. The pages of
/// `listen.metrics` have no `POST`.
fn check_access<B>(request: &Request<B>, scope: AdminScope, settings: &Admin) -> Result<(), DecisionError> {
    if !has_allowed_host(request, &settings.hosts) {
        return Err(DecisionError::UnknownHost);
    }
    match &settings.token {
        Some(token)
            if scope == AdminScope::Everything
                && request.method() == Method::POST
                && !has_token(request.headers(), &token.0) =>
        {
            Err(DecisionError::Unauthorized)
        }
        _ => Ok(()),
    }
}

/// Whether a request has the token of the admin address (RFC 6750). The time of the comparison tells nothing about the token.
fn has_token(fields: &HeaderMap, token: &str) -> bool {
    let given = fields.get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.split_once(' '));
    given.is_some_and(|(scheme, given)| {
        scheme.eq_ignore_ascii_case("bearer")
            && verify_slices_are_equal(given.trim().as_bytes(), token.as_bytes()).is_ok()
    })
}

/// `GET /v1/top`: the busiest keys of one rule or of all.
async fn busiest_keys(state: &AdminState, query: &str) -> LocalResponse {
    let decision_api = state.decision_api.borrow().clone();
    let Some(decision_api) = decision_api else { return responses::not_ready_response(String::from("starting\n")) };
    let listed = match TopQuery::parse(query) {
        Ok(query) => query.list(state, &decision_api.served).await,
        Err(error) => Err(error),
    };
    match listed {
        Ok(lists) => responses::json_response(format!("{lists}\n")),
        Err(error) => responses::decision_error_response(&error),
    }
}

/// Whether all hosts that a request names belong to the admin address. HTTP/1.0 clients may name none; browsers always do.
fn has_allowed_host<B>(request: &Request<B>, hosts: &[String]) -> bool {
    let fields = request.headers().get_all(HOST).iter().map(|value| Authority::try_from(value.as_bytes()).ok());
    let mut named = fields.chain(request.uri().authority().map(|authority| Some(authority.clone())));
    named.all(|authority| authority.is_some_and(|authority| is_allowed_host(authority.host(), hosts)))
}

fn is_allowed_host(host: &str, hosts: &[String]) -> bool {
    let host = host.to_ascii_lowercase();
    let ip = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let is_ip = host.parse::<Ipv4Addr>().is_ok() || ip.is_some_and(|ip| ip.parse::<Ipv6Addr>().is_ok());
    let is_named = |known: &String| match known.strip_prefix('*') {
        Some(suffix) => host.len() > suffix.len() && host.ends_with(suffix),
        None => host == *known,
    };
    is_ip || host == "localhost" || hosts.iter().any(is_named)
}

/// Whether a browser marks the request as cross-origin: any web page can make a browser POST to an address that only this
/// machine reaches.
fn is_cross_origin(fields: &HeaderMap) -> bool {
    let text = |name: &HeaderName| fields.get(name).map(|value| value.to_str().unwrap_or_default());
    let site = text(&SEC_FETCH_SITE);
    let Some(origin) = text(&ORIGIN) else { return site.is_some_and(|site| !["same-origin", "none"].contains(&site)) };
    let host = text(&HOST).unwrap_or_default();
    origin.split_once("://").is_none_or(|(_, authority)| authority != host)
}

/// The response to a method that a page does not have.
fn refuse_method<B>(request: &Request<B>) -> Option<LocalResponse> {
    if [Method::GET, Method::HEAD].contains(request.method()) {
        return None;
    }
    let mut reply = responses::error_response(&RequestError::Method);
    reply.headers_mut().insert(http::header::ALLOW, http::HeaderValue::from_static("GET, HEAD"));
    Some(reply)
}

fn handle_page<B>(state: &AdminState, request: &Request<B>) -> LocalResponse {
    let path = request.uri().path();
    if PAGES.contains(&path)
        && let Some(reply) = refuse_method(request)
    {
        return reply;
    }
    match path {
        "/" => dashboard::response(),
        "/metrics" => metrics_page::response(state, request.headers()),
        "/upstreams" => responses::json_response(format!("{:#}\n", upstreams(state))),
        "/healthz" => responses::text_response("ok\n".to_owned()),
        "/readyz" => match state.readiness() {
            Ok(()) => responses::text_response("ready\n".to_owned()),
            Err(why) => responses::not_ready_response(why.to_owned()),
        },
        _ => responses::error_response(&RequestError::NoRoute),
    }
}

/// The state of all upstream servers.
fn upstreams(state: &AdminState) -> serde_json::Value {
    let now = state.clock.instant();
    let upstream_health = state.upstream_health.borrow();
    let upstream_health = upstream_health.iter().filter(|upstream_health| !upstream_health.servers.is_empty());
    serde_json::json!({ "upstreams": upstream_health.map(|upstream_health| upstream_health.to_json(now)).collect::<Vec<_>>() })
}
