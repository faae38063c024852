//! The admin address: `/metrics`, `/upstreams`, `/healthz`, `/readyz`, and the decision API under `/v1/`.
//!
//! Runs on its own thread, so that a scrape takes no time from requests. Accepts only IP addresses, `localhost` and configured
//! names as host, which stops DNS rebinding: a web page whose name resolves to this address could read the responses in a
//! browser. `write_timeout` ends connections with a peer that does not read.

use std::convert::Infallible;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener as StdListener};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, HOST, HeaderMap, HeaderName, ORIGIN};
use http::uri::Authority;
use http::{HeaderValue, Method, Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use crate::clock::Clock;
use crate::decision::{CounterAccess, DecisionService, Operation};
use crate::http::error::DecisionError;
use crate::http::error::RequestError;
use crate::http::responses::{self, LocalResponse};
use crate::metrics::Registry;
use crate::metrics::events::{BUILD_INFO, CLOCK_OFFSET, COUNTERS, NAMES, OVERFLOW};
use crate::metrics::exposition::{Reading, render};
use crate::persistence::counters::Counters;
use crate::redis_store::shared_counters::SharedCounters;
use crate::upstream::server_health::UpstreamHealth;

mod decision_json;
mod write_timeout;

use write_timeout::WriteTimeout;

/// Concurrent connections; further ones are closed at once.
const CONNECTIONS_MAX: usize = 256;
/// How long a peer may leave a response unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// For the head of a request, for a query, and between requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// The pages that [`handle_page`] serves.
const PAGES: [&str; 4] = ["/metrics", "/upstreams", "/healthz", "/readyz"];
const QUERY_MAX_BYTES: usize = 64 * 1024;

/// Whether the admin address accepts connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AcceptState {
    /// Not yet: the process is starting.
    NotStarted,
    Accepting,
    /// Another process has taken over the listener; responses on open connections close them.
    HandedOver,
}

/// What the admin pages read.
pub struct AdminState {
    pub registry: Arc<Registry>,
    pub counters: Arc<Counters>,
    pub clock: Clock,
    /// Readiness. Becomes `false` first when the gateway drains.
    pub ready: Arc<AtomicBool>,
    pub accept_state: watch::Receiver<AcceptState>,
    /// Configured host names of the admin address.
    pub hosts: watch::Receiver<Vec<String>>,
    /// `None` until the first configuration is applied.
    pub decision_service: watch::Receiver<Option<Arc<DecisionService>>>,
    pub upstream_health: watch::Receiver<Vec<Arc<UpstreamHealth>>>,
    /// `None` where counters are not shared between gateways.
    pub shared: Option<Rc<SharedCounters>>,
}

/// Serves the admin pages until the task is dropped.
pub async fn serve(listener: StdListener, state: Rc<AdminState>) -> std::io::Result<()> {
    let mut accept_state = state.accept_state.clone();
    if accept_state.wait_for(|accept_state| *accept_state != AcceptState::NotStarted).await.is_err() {
        return Ok(());
    }
    let listener = TcpListener::from_std(listener)?;
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut is_full = false;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = accept_state.wait_for(|accept_state| *accept_state == AcceptState::HandedOver) => break,
        };
        match accepted {
            Ok((stream, _peer)) => {
                let permit = Arc::clone(&permits).try_acquire_owned();
                let Ok(permit) = permit else {
                    if !is_full {
                        tracing::warn!("the admin address has {CONNECTIONS_MAX} connections; further ones are closed");
                    }
                    is_full = true;
                    continue;
                };
                is_full = false;
                let state = Rc::clone(&state);
                let service = service_fn(move |request| handle(Rc::clone(&state), request));
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_TIMEOUT)
                    .serve_connection(TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT)), service);
                tokio::task::spawn_local(async move {
                    // A peer that closes the connection is no error.
                    drop(connection.await);
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the admin address cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    drop(listener);
    // Open connections are served until the task is dropped.
    std::future::pending().await
}

async fn handle(state: Rc<AdminState>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    if !has_allowed_host(&request, &state.hosts.borrow()) {
        return Ok(finish_response(&state, responses::decision_error_response(&DecisionError::UnknownHost)));
    }
    let operation = match request.uri().path() {
        "/v1/limit" => Operation::Limit,
        "/v1/check" => Operation::Check,
        "/v1/reset" => Operation::Reset,
        "/v1/value" => Operation::Value,
        _ => return Ok(finish_response(&state, handle_page(&state, &request))),
    };
    let decided = decide(&state, operation, request).await;
    Ok(finish_response(&state, decided))
}

/// Closes the connection after this response if another process has taken over.
fn finish_response(state: &AdminState, mut reply: LocalResponse) -> Response<Full<Bytes>> {
    if *state.accept_state.borrow() == AcceptState::HandedOver {
        reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    reply.map(Full::new)
}

/// Handles a request to the decision API.
async fn decide(state: &AdminState, operation: Operation, request: Request<Incoming>) -> LocalResponse {
    if request.method() != Method::POST {
        let mut reply = responses::error_response(&RequestError::Method);
        reply.headers_mut().insert(http::header::ALLOW, http::HeaderValue::from_static("POST"));
        return reply;
    }
    if is_cross_origin(request.headers()) {
        return responses::decision_error_response(&DecisionError::CrossOrigin);
    }
    let body = Limited::new(request.into_body(), QUERY_MAX_BYTES).collect();
    let text = match tokio::time::timeout(HEAD_TIMEOUT, body).await {
        Ok(Ok(text)) => text.to_bytes(),
        Ok(Err(_too_long_or_broken)) => return responses::decision_error_response(&DecisionError::TooLarge),
        Err(_elapsed) => return responses::decision_error_response(&DecisionError::Timeout),
    };
    let service = state.decision_service.borrow().clone();
    // Not reached: the service is set before the listener accepts.
    let Some(service) = service else { return responses::not_ready_response(String::from("starting\n")) };
    match execute(state, &service, operation, &text).await {
        Ok(response) => responses::json_response(format!("{response}\n")),
        Err(error) => responses::decision_error_response(&error),
    }
}

async fn execute(
    state: &AdminState,
    service: &DecisionService,
    operation: Operation,
    text: &[u8],
) -> Result<Value, DecisionError> {
    let query = decision_json::parse(operation, text)?;
    let clock = || state.clock.now().unix_ms;
    let counters = CounterAccess { table: &state.counters.table, clock: &clock, shared: state.shared.as_ref() };
    Ok(decision_json::render(&query, &service.decide(&query, counters).await?))
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

fn handle_page<B>(state: &AdminState, request: &Request<B>) -> LocalResponse {
    let path = request.uri().path();
    if PAGES.contains(&path) && ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut reply = responses::error_response(&RequestError::Method);
        reply.headers_mut().insert(http::header::ALLOW, http::HeaderValue::from_static("GET, HEAD"));
        return reply;
    }
    match path {
        "/metrics" => responses::metrics_response(metrics(state)),
        "/upstreams" => responses::json_response(format!("{:#}\n", upstreams(state))),
        "/healthz" => responses::text_response("ok\n".to_owned()),
        "/readyz" if state.ready.load(Ordering::Acquire) => responses::text_response("ready\n".to_owned()),
        "/readyz" => responses::not_ready_response("draining\n".to_owned()),
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

fn metrics(state: &AdminState) -> String {
    let (counters, now_ms) = (&state.counters, state.clock.now().unix_ms);
    let stats = counters.stats(now_ms);
    let concurrency_overflow =
        state.decision_service.borrow().as_ref().map_or(0, |service| service.concurrency_overflows());
    let overflow =
        counters.table.overflow_charges_total() + counters.table.overflow_refused_total() + concurrency_overflow;
    state.registry.remove_unused();
    let readings = [
        Reading { name: &COUNTERS, labels: vec![("state", "live")], value: stats.live as u64 },
        Reading { name: &COUNTERS, labels: vec![("state", "free")], value: stats.free as u64 },
        Reading { name: &OVERFLOW, labels: vec![], value: overflow },
        Reading { name: &CLOCK_OFFSET, labels: vec![], value: state.clock.offset_s() as u64 },
        Reading { name: &BUILD_INFO, labels: vec![("version", env!("CARGO_PKG_VERSION"))], value: 1 },
    ];
    render(&state.registry, &NAMES, &readings)
}
