//! `GET /v1/events`: the state of the gateway as server-sent events, once a second, for the dashboard.
//!
//! `?hours=6` and `?hours=24` choose a longer history than that of one hour. One task reads the metrics, whatever the number of streams. It makes a sample of the history every ten seconds, and does
//! nothing else while no stream is open. Each stream has a task that waits until its connection has room; events meanwhile are
//! left out, so a slow reader costs no memory, and `write_timeout` ends it. Streams end when another process takes over, or when the
//! token of their request is no longer valid.

use std::cell::Cell;
use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body::{Body, Frame};
use http_body_util::Either;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::authorization::{Caller, is_cross_origin};
use super::endpoints::{Call, with_body};
use super::history::{History, Range, Sample};
use super::top_query::TopQuery;
use super::{AdminBody, AdminState, DecisionApi, upstreams};
use transom_config::listen::{Admin, Role};
use transom_http::error::ApiError;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{OnLimit, Rule};
use transom_limiter::window::Windows;
use transom_rules::responses;
use transom_rules::top_keys::KeyOutcome;
use transom_runtime::metrics::events::{CONNECTIONS, DELAYED_REQUESTS, REQUESTS_ACTIVE, UPSTREAM_REQUESTS};
use transom_runtime::metrics::totals::{Totals, value};
use transom_runtime::metrics::{redis, upstream};

const PERIOD: Duration = Duration::from_secs(1);
/// Streams at a time.
const STREAMS_MAX: usize = 16;
/// The table is read, and the busiest keys are collected, once in so many events.
const TABLE_EVERY: u64 = 10;
const TOP_KEYS_EVERY: u64 = 5;
/// Busiest keys of each rule.
const TOP_KEYS: usize = 10;
/// Rules and routes that are described.
const DESCRIBED_MAX: usize = 500;
/// Plans of a rule that are described.
const PLANS_MAX: usize = 10;

/// The streams, and what they send.
pub struct Events {
    /// Read by an upgrade too.
    history: Arc<Mutex<History>>,
    /// The latest event.
    latest: watch::Sender<Bytes>,
    /// Wakes the task for the first stream.
    opened: Notify,
    streams: Cell<usize>,
    /// Since when this process counts, Unix milliseconds.
    started_ms: Cell<u64>,
    has_ended: watch::Sender<bool>,
}

impl Events {
    pub fn new(history: Arc<Mutex<History>>) -> Events {
        Events {
            history,
            latest: watch::Sender::new(Bytes::new()),
            opened: Notify::new(),
            streams: Cell::new(0),
            started_ms: Cell::new(0),
            has_ended: watch::Sender::new(false),
        }
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all streams.
    pub fn end(&self) {
        self.has_ended.send_replace(true);
    }
}

/// The body of a response with events.
pub struct EventBody(mpsc::Receiver<Bytes>);

impl Body for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|events| events.map(|events| Ok(Frame::data(events))))
    }
}

/// `GET /v1/events`. `hours`: of the history, 1 without it. A page of another origin could not read the events, but could use up all streams.
pub fn open(call: &Call) -> Result<Response<AdminBody>, ApiError> {
    if call.parts.method == Method::HEAD {
        return Ok(with_body(responses::event_stream_head()));
    }
    if is_cross_origin(&call.parts.headers) {
        return Err(ApiError::CrossOrigin);
    }
    let hours = call.query().split('&').find_map(|pair| pair.strip_prefix("hours=")?.parse().ok());
    let body = open_stream(call, Range::of_hours(hours.unwrap_or(1)))?;
    Ok(responses::event_stream_head().map(|_empty| Either::Right(body)))
}

fn open_stream(call: &Call, range: Range) -> Result<EventBody, ApiError> {
    let (state, request) = (Rc::clone(&call.state), Request::from_parts(call.parts.clone(), ()));
    let streams = &state.events.streams;
    if state.accept_state.borrow().is_over() {
        return Err(ApiError::HandedOver);
    }
    if streams.get() >= STREAMS_MAX {
        return Err(ApiError::TooManyStreams);
    }
    streams.set(streams.get() + 1);
    let (sender, receiver) = mpsc::channel(1);
    tokio::task::spawn_local(async move {
        let mut has_ended = state.events.has_ended.subscribe();
        tokio::select! {
            () = send_events(&state, range, &sender) => {}
            () = sender.closed() => {}
            () = access_lost(&state, &request) => {}
            _ = has_ended.wait_for(|has_ended| *has_ended) => {}
        }
        let streams = &state.events.streams;
        streams.set(streams.get() - 1);
    });
    Ok(EventBody(receiver))
}

/// Waits until the configuration no longer permits the request, such as after its token was removed.
async fn access_lost(state: &AdminState, request: &Request<()>) {
    let mut settings = state.settings.clone();
    let permitted =
        |settings: &Admin| Caller::identify(request, settings).is_ok_and(|caller| caller.require(Role::Read).is_ok());
    // An error means that the gateway ends, and streams with it.
    let _ = settings.wait_for(|settings| !permitted(settings)).await;
}

/// Sends to one stream: first the history and the configuration.
async fn send_events(state: &AdminState, range: Range, sender: &mpsc::Sender<Bytes>) {
    let events = &state.events;
    let mut latest = events.latest.subscribe();
    // Others have the latest event for this one too.
    let mut has_event = events.latest.receiver_count() > 1;
    if !has_event {
        events.opened.notify_one();
    }
    // The samples of the range, then the shorter ones since its latest.
    let shortest = Range::of_hours(1);
    let mut next = [(range, 0), (shortest, 0)];
    let mut downtimes = Value::Null;
    let mut described: Option<(Arc<DecisionApi>, u64)> = None;
    let mut text = String::from("retry: 1000\n\n");
    loop {
        let decision_api = state.decision_api.borrow().clone();
        if let Some(decision_api) = decision_api {
            let reloads = state.registry.reload_log.total();
            let is_known = |(known, at): &(Arc<DecisionApi>, u64)| Arc::ptr_eq(known, &decision_api) && *at == reloads;
            if !described.as_ref().is_some_and(is_known) {
                push_event(&mut text, "config", &configuration(state, &decision_api));
                described = Some((decision_api, reloads));
            }
        }
        let known = events.history().downtimes();
        if known != downtimes {
            push_event(&mut text, "downtimes", &known);
            downtimes = known;
        }
        next[1].1 = events.history().first_beyond(range).max(next[1].1);
        for (range, next_sample) in &mut next {
            while *next_sample < events.history().next(*range) {
                let (samples, next) = events.history().since(*range, *next_sample);
                *next_sample = next;
                push_event(&mut text, "history", &samples);
                if sender.send(Bytes::from(std::mem::take(&mut text))).await.is_err() {
                    return;
                }
            }
        }
        if std::mem::replace(&mut has_event, true) {
            text.push_str(&String::from_utf8_lossy(&latest.borrow_and_update()));
        }
        if !text.is_empty() && sender.send(Bytes::from(std::mem::take(&mut text))).await.is_err() {
            return;
        }
        // When there is room for the next events, so that they are not old when they are sent.
        if sender.reserve().await.is_err() || latest.changed().await.is_err() {
            return;
        }
    }
}

fn push_event(text: &mut String, name: &str, data: &Value) {
    text.push_str(&format!("event: {name}\ndata: {data}\n\n"));
}

/// Makes the history, and the events while a stream is open.
pub async fn run(state: Rc<AdminState>) {
    let events = &state.events;
    let started_ms = state.clock.now().unix_ms;
    events.started_ms.set(started_ms);
    events.history().begin(started_ms);
    let mut timer = interval(PERIOD);
    timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut snapshots = Snapshots::default();
    loop {
        tokio::select! {
            _ = timer.tick() => {}
            () = events.opened.notified() => {}
        }
        let now_ms = state.clock.now().unix_ms;
        let (is_watched, is_due) = (events.latest.receiver_count() > 0, events.history().is_due(now_ms));
        if !is_watched {
            snapshots = Snapshots::default();
        }
        if !is_watched && !is_due {
            continue;
        }
        let totals = Totals::read(&state.registry);
        if is_due {
            let now = state.clock.instant();
            let upstream_health = state.upstream_health.borrow();
            let servers = upstream_health.iter().flat_map(|upstream| upstream.troubled_servers(now));
            let store = (state.registry.total(&redis::UNREACHABLE) > 0).then_some("");
            events.history().add(now_ms, &totals, store.into_iter().chain(servers));
        }
        if is_watched {
            let snapshot = snapshots.take(&state, now_ms, totals).await;
            events.latest.send_replace(Bytes::from(format!("data: {snapshot}\n\n")));
        }
    }
}

/// What the events of a series have in common.
#[derive(Default)]
struct Snapshots {
    taken: u64,
    /// The previous reading and its time.
    previous: Option<(u64, Totals)>,
    counters: Value,
    top_keys: Value,
}

impl Snapshots {
    async fn take(&mut self, state: &AdminState, now_ms: u64, totals: Totals) -> Value {
        if self.taken.is_multiple_of(TABLE_EVERY) {
            let stats = state.counters.stats(now_ms);
            self.counters = json!({ "live": stats.live, "free": stats.free });
        }
        if self.taken.is_multiple_of(TOP_KEYS_EVERY) {
            // A worker that is stuck does not delay the events for long.
            if let Ok(lists) = timeout(PERIOD / 2, top_keys(state)).await {
                self.top_keys = lists;
            }
        }
        self.taken += 1;
        let live = self.previous.as_ref().map(|(then_ms, previous)| {
            let span_ms = now_ms.saturating_sub(*then_ms);
            Sample::new(now_ms, span_ms, &totals.since(previous), |name| Arc::from(name)).to_json()
        });
        self.previous = Some((now_ms, totals));
        let mut counters = self.counters.clone();
        counters["overflow"] = json!(state.overflow_total());
        json!({
            "time": now_ms,
            "version": env!("CARGO_PKG_VERSION"),
            "started": state.events.started_ms.get(),
            "draining": state.is_draining(),
            "live": live,
            "requests_active": state.registry.total(&REQUESTS_ACTIVE),
            "requests_delayed": state.registry.total(&DELAYED_REQUESTS),
            "connections": state.registry.total(&CONNECTIONS),
            "counters": counters,
            "upstreams": upstreams_with_requests(state),
            "shared": shared_store(state),
            "top": self.top_keys,
        })
    }
}

/// The upstream servers, with their requests.
fn upstreams_with_requests(state: &AdminState) -> Value {
    let mut listed = upstreams(state)["upstreams"].take();
    let mut add = |labels: &[_], name: &str, count: u64| {
        let upstreams = listed.as_array_mut().into_iter().flatten();
        let of_upstream = upstreams.filter(|upstream| upstream["name"] == value(labels, "upstream"));
        let servers = of_upstream.filter_map(|upstream| upstream["servers"].as_array_mut()).flatten();
        for server in servers.filter(|server| server["url"] == value(labels, "server")) {
            server[name] = json!(server[name].as_u64().unwrap_or(0) + count);
        }
    };
    state.registry.sum_cells(&UPSTREAM_REQUESTS, |labels, count| {
        add(labels, "requests", count);
        if !["responded", "canceled"].contains(&value(labels, "outcome").as_str()) {
            add(labels, "failed", count);
        }
    });
    state.registry.sum_cells(&upstream::REQUESTS_ACTIVE, |labels, count| add(labels, "active", count));
    listed
}

/// The state of the shared store; null without one.
fn shared_store(state: &AdminState) -> Value {
    let decision_api = state.decision_api.borrow();
    let shared = decision_api.as_ref().and_then(|decision_api| decision_api.served.config.counters.shared.as_ref());
    let Some(shared) = shared else { return Value::Null };
    let registry = &state.registry;
    let mut calls = json!({});
    registry.sum_cells(&redis::REQUESTS, |labels, count| calls[value(labels, "outcome")] = json!(count));
    let duration = registry.total_duration(&redis::DURATION);
    json!({
        "store": shared.nodes.to_string(),
        "unreachable": registry.total(&redis::UNREACHABLE),
        "evicting": registry.total(&redis::EVICTING),
        "outages": registry.total(&redis::OUTAGES),
        "outage_decisions": registry.total(&redis::OUTAGE_DECISIONS),
        "calls": calls,
        "p50": duration.quantile_us(0.5),
        "p99": duration.quantile_us(0.99),
    })
}

/// The busiest keys; null if they are not counted.
async fn top_keys(state: &AdminState) -> Value {
    let decision_api = state.decision_api.borrow().clone();
    let Some(decision_api) = decision_api else { return Value::Null };
    let mut lists = json!({});
    for outcome in KeyOutcome::ALL {
        match TopQuery::of_all_rules(outcome, TOP_KEYS).list(state, &decision_api.served).await {
            Ok(mut listed) => lists[outcome.name()] = listed["rules"].take(),
            Err(_off) => return Value::Null,
        }
    }
    lists
}

/// What changes at a reload only.
fn configuration(state: &AdminState, decision_api: &DecisionApi) -> Value {
    let config = &decision_api.served.config;
    let routes = config.routes.iter().take(DESCRIBED_MAX).map(|route| {
        let rules = route.rules.iter().map(|rule| config.rules[*rule].name.as_str());
        json!({
            "name": route.name, "path": route.path.text,
            "upstream": route.upstream.map(|upstream| config.upstreams[upstream].name.as_str()),
            "rules": rules.collect::<Vec<_>>(),
        })
    });
    let reloads = state.registry.reload_log.latest().into_iter();
    json!({
        "rules": config.limiter_rules().take(DESCRIBED_MAX).map(describe_rule).collect::<Vec<_>>(),
        "routes": routes.collect::<Vec<_>>(),
        "rule_count": config.rules.len(),
        "route_count": config.routes.len(),
        "upstream_count": config.upstreams.len(),
        "top_keys": config.admin.top_keys > 0,
        "clients": config.clients.is_some(),
        "access": config.access.is_some(),
        "text": config.text,
        "version": text_version(&config.text),
        "loaded": decision_api.loaded_ms,
        "token_required": state.settings.borrow().known_tokens().next().is_some(),
        "reloads": reloads.map(|reload| json!({ "time": reload.at_ms, "problem": reload.problem })).collect::<Vec<_>>(),
    })
}

/// Tells one text of the configuration from another: the beginning of its SHA-256.
fn text_version(text: &str) -> String {
    Sha256::digest(text).iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

fn describe_rule(rule: &Rule) -> Value {
    let window = |limit: &Limit| {
        let kind = if matches!(limit.windows, Windows::Sliding { .. }) { " sliding" } else { "" };
        format!("{}/{}{kind}", limit.tokens, limit.period_text)
    };
    let limits = |layers: &[Limit], concurrent: Option<u32>| -> Vec<String> {
        let concurrent = concurrent.map(|slots| format!("{slots} at a time"));
        layers.iter().map(window).chain(concurrent).collect()
    };
    let variants = rule.variants().zip(rule.concurrent_variants()).skip(1);
    let plans = rule.plans.iter().zip(variants).take(PLANS_MAX);
    let plans =
        plans.map(|(plan, (layers, concurrent))| json!({ "name": plan.name, "limits": limits(layers, concurrent) }));
    let on_limit = match rule.on_limit {
        OnLimit::Refuse => "refuse",
        OnLimit::Delay { .. } => "delay",
        OnLimit::Shadow => "shadow",
    };
    json!({
        "name": rule.name, "key": rule.key.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "limits": limits(&rule.layers, rule.concurrent), "on_limit": on_limit, "shared": rule.is_shared(),
        "plans": plans.collect::<Vec<_>>(), "plan_count": rule.plans.len(),
    })
}
