//! The admin address: `/metrics`, `/upstreams`, `/healthz`, `/readyz`, and the decision API under `/v1/`.
//!
//! It has a thread of its own, so that a scrape takes no time from requests. It is asked by IP address, as `localhost` or
//! by a name from the configuration: a page of any site can have a name of its own lead here (DNS rebinding), and would
//! read what its visitor can reach. `write_timeout` ends connections whose peer does not read.

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
use crate::decision::{DecisionService, Operation};
use crate::http::error::DecisionError;
use crate::http::error::RequestError;
use crate::http::responses::{self, Reply};
use crate::metrics::Registry;
use crate::metrics::events::{BUILD_INFO, CLOCK_OFFSET, COUNTERS, NAMES, OVERFLOW};
use crate::metrics::exposition::{Reading, render};
use crate::persistence::Counters;
use crate::redis_store::Shared;
use crate::redis_store::admin_queries::{KeyState, Subject};
use crate::redis_store::decision::Unavailable;
use crate::upstream::server_health::UpstreamHealth;

mod write_timeout;

use write_timeout::WriteTimeout;

/// Connections at a time; one more is closed at once.
const CONNECTIONS_MAX: usize = 256;
/// How long a peer may leave an answer unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Until a request's head is there, and between requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const QUERY_MAX_BYTES: usize = 64 * 1024;

/// Who is let in at the admin address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AcceptState {
    /// Nobody yet.
    NotStarted,
    Accepting,
    /// Another process is at the door; whoever is inside is asked to go there the next time.
    HandedOver,
}

/// What the admin pages tell of.
pub struct AdminState {
    pub registry: Arc<Registry>,
    pub counters: Arc<Counters>,
    pub clock: Clock,
    /// Whether new clients should be sent here; down before anything else when the gateway drains.
    pub ready: Arc<AtomicBool>,
    pub accept_state: watch::Receiver<AcceptState>,
    /// Names by which it may be asked, as the configuration has them.
    pub hosts: watch::Receiver<Vec<String>>,
    /// Who answers the decision API.
    pub decision_service: watch::Receiver<Option<Arc<DecisionService>>>,
    pub upstream_health: watch::Receiver<Vec<Arc<UpstreamHealth>>>,
    /// Where gateways share counters.
    pub shared: Option<Rc<Shared>>,
}

/// Serves the admin pages until the task is dropped.
pub async fn serve(listener: StdListener, office: Rc<AdminState>) -> std::io::Result<()> {
    let mut doorway = office.accept_state.clone();
    if doorway.wait_for(|doorway| *doorway != AcceptState::NotStarted).await.is_err() {
        return Ok(());
    }
    let listener = TcpListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut is_full = false;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = doorway.wait_for(|doorway| *doorway == AcceptState::HandedOver) => break,
        };
        match accepted {
            Ok((stream, _peer)) => {
                let place = Arc::clone(&places).try_acquire_owned();
                let Ok(place) = place else {
                    if !is_full {
                        tracing::warn!("the admin address has {CONNECTIONS_MAX} connections: more are closed");
                    }
                    is_full = true;
                    continue;
                };
                is_full = false;
                let office = Rc::clone(&office);
                let service = service_fn(move |request| handle(Rc::clone(&office), request));
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_TIMEOUT)
                    .serve_connection(TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT)), service);
                tokio::task::spawn_local(async move {
                    // A scraper that went away is no error.
                    drop(connection.await);
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the admin address can not accept for the moment");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    drop(listener);
    // Those who are inside are served until the task is dropped.
    std::future::pending().await
}

async fn handle(office: Rc<AdminState>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    if !has_allowed_host(&request, &office.hosts.borrow()) {
        return Ok(finish_response(&office, responses::unanswered(&DecisionError::Host)));
    }
    let verb = match request.uri().path() {
        "/v1/limit" => Operation::Limit,
        "/v1/check" => Operation::Check,
        "/v1/reset" => Operation::Reset,
        "/v1/value" => Operation::Value,
        _ => return Ok(finish_response(&office, handle_page(&office, &request))),
    };
    let decided = decide(&office, verb, request).await;
    Ok(finish_response(&office, decided))
}

/// An answer, which is the last one on its connection if another process is asked from now on.
fn finish_response(office: &AdminState, mut reply: Reply) -> Response<Full<Bytes>> {
    if *office.accept_state.borrow() == AcceptState::HandedOver {
        reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    reply.map(Full::new)
}

/// One question to the decision API.
async fn decide(office: &AdminState, verb: Operation, request: Request<Incoming>) -> Reply {
    if request.method() != Method::POST {
        let mut reply = responses::fault(&RequestError::Method);
        reply.headers_mut().insert(http::header::ALLOW, http::HeaderValue::from_static("POST"));
        return reply;
    }
    if is_cross_origin(request.headers()) {
        return responses::unanswered(&DecisionError::Foreign);
    }
    let question = Limited::new(request.into_body(), QUERY_MAX_BYTES).collect();
    let text = match tokio::time::timeout(HEAD_TIMEOUT, question).await {
        Ok(Ok(text)) => text.to_bytes(),
        Ok(Err(_too_long_or_broken)) => return responses::unanswered(&DecisionError::TooLong),
        Err(_elapsed) => return responses::unanswered(&DecisionError::TooSlow),
    };
    let counsel = office.decision_service.borrow().clone();
    // There is one before the first question can come.
    let Some(counsel) = counsel else { return responses::not_ready(String::from("starting\n")) };
    match execute(office, &counsel, verb, &text).await {
        Ok(answer) => responses::json(format!("{answer}\n")),
        Err(why) => responses::unanswered(&why),
    }
}

/// Answers a question: by the counters of this machine, or by those that gateways share.
async fn execute(
    office: &AdminState,
    counsel: &DecisionService,
    verb: Operation,
    text: &[u8],
) -> Result<Value, DecisionError> {
    let Some(heard) = counsel.parse(text)? else { return Ok(DecisionService::exempt_response()) };
    let now_ms = || office.clock.now().unix_ms;
    let (Some(shared), Some(text)) = (&office.shared, counsel.store_key(&heard)) else {
        return Ok(counsel.decide_locally(verb, &heard, &office.counters.table, &now_ms));
    };
    let (rule_set, charge_plan) = counsel.charge_plan(&heard);
    let subject = Subject {
        rule_set,
        charge_plan,
        keyed_request: heard.keyed_request,
        reserve: heard.reserve,
        text: text.into(),
    };
    let uncounted = |Unavailable| DecisionError::StoreUnavailable;
    let (context, allowed, again_ms) = match verb {
        Operation::Limit => {
            let ruling = shared.limit(&subject).await.map_err(uncounted)?;
            let (allowed, again_ms) = counsel.outcome(&heard, &ruling.judgement, &ruling.context, now_ms());
            (ruling.context, allowed, again_ms)
        }
        // Whether there is a place in a window to come is found out by taking it.
        Operation::Check if heard.reserve => {
            let (judgement, standing) = shared.check(&subject).await.map_err(uncounted)?;
            let (allowed, again_ms) = counsel.outcome(&heard, &judgement, &standing.context, now_ms());
            (standing.context, allowed, again_ms)
        }
        Operation::Check | Operation::Value => {
            let KeyState { context, room } = shared.value(&subject).await.map_err(uncounted)?;
            let again_ms = counsel.retry_at_ms(&heard, &context, now_ms());
            (context, room, again_ms)
        }
        Operation::Reset => {
            let KeyState { context, room } = shared.reset(&subject).await.map_err(uncounted)?;
            (context, room, Some(now_ms()))
        }
    };
    Ok(counsel.response(&heard, &context, allowed, again_ms, now_ms()))
}

/// Whether a request is for this address by a name that nobody else can have lead here. Clients of HTTP/1.0 need not
/// name any; browsers always do.
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

/// Whether a browser says that a page of another origin asks: anybody's page can have it send a POST
/// to an address that only this machine reaches.
fn is_cross_origin(fields: &HeaderMap) -> bool {
    let text = |name: &HeaderName| fields.get(name).map(|value| value.to_str().unwrap_or_default());
    let site = text(&SEC_FETCH_SITE);
    let Some(origin) = text(&ORIGIN) else { return site.is_some_and(|site| !["same-origin", "none"].contains(&site)) };
    let host = text(&HOST).unwrap_or_default();
    origin.split_once("://").is_none_or(|(_, authority)| authority != host)
}

fn handle_page<B>(office: &AdminState, request: &Request<B>) -> Reply {
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut reply = responses::fault(&RequestError::Method);
        reply.headers_mut().insert(http::header::ALLOW, http::HeaderValue::from_static("GET, HEAD"));
        return reply;
    }
    match request.uri().path() {
        "/metrics" => responses::metrics(metrics(office)),
        "/upstreams" => responses::json(format!("{:#}\n", upstreams(office))),
        "/healthz" => responses::text("ok\n".to_owned()),
        "/readyz" if office.ready.load(Ordering::Acquire) => responses::text("ready\n".to_owned()),
        "/readyz" => responses::not_ready("draining\n".to_owned()),
        _ => responses::fault(&RequestError::NoRoute),
    }
}

/// How the servers are.
fn upstreams(office: &AdminState) -> serde_json::Value {
    let now = office.clock.instant();
    let upstream_health = office.upstream_health.borrow();
    let upstream_health = upstream_health.iter().filter(|upstream_health| !upstream_health.servers.is_empty());
    serde_json::json!({ "upstreams": upstream_health.map(|upstream_health| upstream_health.describe(now)).collect::<Vec<_>>() })
}

fn metrics(office: &AdminState) -> String {
    let (counters, now_ms) = (&office.counters, office.clock.now().unix_ms);
    let census = counters.census(now_ms);
    let overflow = counters.table.overflow_charges_total() + counters.table.overflow_refused_total();
    office.registry.remove_unused();
    let readings = [
        Reading { name: &COUNTERS, labels: vec![("state", "live")], value: census.live as u64 },
        Reading { name: &COUNTERS, labels: vec![("state", "free")], value: census.free as u64 },
        Reading { name: &OVERFLOW, labels: vec![], value: overflow },
        Reading { name: &CLOCK_OFFSET, labels: vec![], value: office.clock.offset_s() as u64 },
        Reading { name: &BUILD_INFO, labels: vec![("version", env!("CARGO_PKG_VERSION"))], value: 1 },
    ];
    render(&office.registry, &NAMES, &readings)
}
