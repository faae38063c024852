//! The thread that logs events and sends them to the receiver, in order. A request that fails is repeated; a full queue drops events.

use std::fmt::Write as _;
use std::future::poll_fn;
use std::mem;
use std::time::Duration;

use aws_lc_rs::hmac;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request};
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{sleep, timeout};

use super::MarkEvent;
use crate::upstream::pool::ConnectionPool;
use crate::upstream::request_body::{BodySource, ClientBody, RequestBody, UploadLimits};
use transom_config::notify::NotifyReceiver;
use transom_config::redis::StoreConfig;
use transom_config::upstream::{HostField, TransportSettings, UpstreamProtocol};
use transom_limiter::key::Seed;
use transom_limiter::store_key::{StoreWindow, counter_name};
use transom_runtime::clock::Clock;
use transom_runtime::metrics::events::NotifyMetrics;
use transom_store::client::RedisClient;
use transom_store::scripts::{AcquireReply, CounterRequest};

/// Capacity of the queue of the workers, and of the queue of events to be sent.
const QUEUE_EVENTS: usize = 1024;
/// Requests for one event.
const ATTEMPTS: u32 = 12;
/// Limit for one request.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time from the first failure to the next request. It doubles with each failure.
const RETRY_AFTER: Duration = Duration::from_millis(500);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// Limit for a question to the store.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);

const SIGNATURE: HeaderName = HeaderName::from_static("x-transom-signature");
const USER_AGENT_VALUE: HeaderValue = HeaderValue::from_static("transom");
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Where events go.
#[derive(Clone, PartialEq, Debug)]
pub struct Destination {
    pub receiver: Option<NotifyReceiver>,
    /// The store in which gateways agree on who sends an event.
    pub store: Option<StoreConfig>,
}

/// The thread's state.
pub struct EventSender {
    events: Receiver<MarkEvent>,
    destination: Destination,
    metrics: NotifyMetrics,
    clock: Clock,
}

/// Why a request failed.
enum SendError {
    /// Another attempt may succeed.
    Temporary(String),
    /// The receiver rejects the event.
    Rejected(String),
}

impl EventSender {
    /// The sender, and its queue. It ends when the queue is dropped.
    pub fn new(destination: Destination, metrics: NotifyMetrics, clock: Clock) -> (EventSender, Sender<MarkEvent>) {
        let (queue, events) = channel(QUEUE_EVENTS);
        (EventSender { events, destination, metrics, clock }, queue)
    }

    /// Handles events until all senders of the queue are dropped.
    pub async fn run(self) {
        let EventSender { mut events, destination: Destination { receiver, store }, metrics, clock } = self;
        let store = store.as_ref().map(|settings| (RedisClient::new(settings), settings.prefix.clone()));
        let (queue, mut to_send) = channel::<(String, Bytes)>(QUEUE_EVENTS);
        let log_events = async {
            // Owned, so that the other half ends when all events are logged.
            let queue = queue;
            while let Some(event) = events.recv().await {
                if let (Some((store, prefix)), Some(store_key)) = (&store, &event.store_key)
                    && !is_first(store, prefix, store_key, &event).await
                {
                    metrics.duplicate();
                    continue;
                }
                event.log();
                match &receiver {
                    None => metrics.logged(),
                    Some(_) if queue.try_send(event.to_request_body()).is_ok() => {}
                    Some(_) => metrics.dropped(),
                }
            }
        };
        let send_events = async {
            let Some(receiver) = &receiver else { return };
            let mut is_failing = false;
            while let Some((id, body)) = to_send.recv().await {
                match deliver(receiver, &id, body, &clock, &mut is_failing).await {
                    true => metrics.delivered(),
                    false => metrics.failed(),
                }
            }
        };
        tokio::join!(log_events, send_events);
    }
}

/// Whether no other gateway has sent the event. A store that does not respond does not hinder it.
async fn is_first(store: &RedisClient, prefix: &str, store_key: &str, event: &MarkEvent) -> bool {
    // The end of a sliding window is that of the pause between two events.
    let end_ms = if event.is_sliding { 0 } else { event.end_ms };
    let id = Seed::SHARED.hash(&[store_key, &event.window, &event.mark_text(), &end_ms.to_string()]);
    let request = CounterRequest {
        key_base: counter_name(prefix, &format!("#notify|{id:016x}"), 0, "").into(),
        window: StoreWindow::floating(event.end_ms.saturating_sub(event.time_ms)),
        limit: 1,
        ceiling: 1,
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
    let reply = timeout(STORE_TIMEOUT, store.acquire(&[request], 0)).await;
    !matches!(reply, Ok(Ok(AcquireReply::Refused { .. })))
}

/// Sends one event. Returns `false` if the receiver does not take it.
async fn deliver(receiver: &NotifyReceiver, id: &str, body: Bytes, clock: &Clock, is_failing: &mut bool) -> bool {
    let url = &receiver.server.url;
    let mut pause = RETRY_AFTER;
    for attempt in 1.. {
        let sent = timeout(ATTEMPT_TIMEOUT, post(receiver, id, body.clone(), clock)).await;
        let error = match sent.unwrap_or_else(|_elapsed| Err(SendError::Temporary("no response in time".to_owned()))) {
            Ok(()) => {
                if mem::take(is_failing) {
                    tracing::info!(url, "notifications are sent again");
                }
                return true;
            }
            Err(SendError::Rejected(why)) => {
                tracing::warn!(url, id, "a notification is rejected: {why}");
                return false;
            }
            Err(SendError::Temporary(why)) => why,
        };
        // Logged once per outage.
        if !mem::replace(is_failing, true) {
            tracing::warn!(url, "notifications cannot be sent: {error}; they are repeated");
        }
        if attempt == ATTEMPTS {
            tracing::warn!(url, id, "a notification is given up after {ATTEMPTS} attempts: {error}");
            break;
        }
        sleep(pause.mul_f64(0.75 + fastrand::f64() * 0.25)).await;
        pause = (2 * pause).min(RETRY_AFTER_MAX);
    }
    false
}

async fn post(receiver: &NotifyReceiver, id: &str, body: Bytes, clock: &Clock) -> Result<(), SendError> {
    let transport = TransportSettings {
        protocol: UpstreamProtocol::Http1,
        host: HostField::Server,
        tls: receiver.tls.clone(),
        resolve: ATTEMPT_TIMEOUT,
        dns_servers: Vec::new(),
        proxy_protocol: None,
    };
    // A new pool for each request, so that the name is resolved again.
    let pool = ConnectionPool::new(receiver.server.clone(), &transport, None, clock.clone());
    let connected = pool.connect(None, ATTEMPT_TIMEOUT, ATTEMPT_TIMEOUT, true, false).await;
    let mut connection = connected.map_err(|error| SendError::Temporary(error.operator_message()))?;
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(receiver.target.clone())
        .header(HOST, pool.authority())
        .header(USER_AGENT, USER_AGENT_VALUE)
        .header(CONTENT_TYPE, JSON)
        .header("x-transom-event", id);
    if let Some(secret) = &receiver.secret {
        request = request.header(SIGNATURE, signature(&secret.0, &body));
    }
    let body = Full::new(body).map_err(|never| match never {});
    let body = ClientBody::new(BodySource::Http1(Box::pin(body)), &HeaderMap::new(), None);
    let body = RequestBody::new(body, || UploadLimits::new(None, None));
    let request = request.body(body).map_err(|invalid| SendError::Rejected(invalid.to_string()))?;
    let sent = connection.send(Box::new(request), None).await;
    let response = sent.map_err(|error| SendError::Temporary(format!("no response: {error}")))?;
    let why = |status: u16| format!("the receiver responded with {status}");
    match response.status().as_u16() {
        200..300 => {}
        // Of the failures that the client caused, these are said to pass.
        status @ (408 | 425 | 429 | 500..) => return Err(SendError::Temporary(why(status))),
        status => return Err(SendError::Rejected(why(status))),
    }
    while let Some(Ok(_frame)) = poll_fn(|cx| connection.poll_body(cx)).await {}
    Ok(())
}

/// The HMAC-SHA256 of a body, in hex.
fn signature(secret: &[u8], body: &[u8]) -> String {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), body);
    tag.as_ref().iter().fold(String::new(), |mut hex, byte| {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

impl MarkEvent {
    fn mark_text(&self) -> String {
        format!("{}%", self.mark)
    }

    fn log(&self) {
        let MarkEvent { rule, window, key, used, limit, .. } = self;
        let (client, plan) = (self.client.as_deref(), self.plan.as_deref());
        tracing::info!(rule, window, key, client, plan, mark = self.mark_text(), used, limit, "quota_mark");
    }

    /// The id, and the event as JSON.
    fn to_request_body(&self) -> (String, Bytes) {
        // Equal for repetitions, so that a receiver can ignore what it knows.
        let (mark, times) = (self.mark_text(), format!("{} {}", self.time_ms, self.end_ms));
        let id = Seed::SHARED.hash(&[&self.rule, &self.window, &self.key, &mark, &times]);
        let id = format!("{id:016x}");
        let time = |unix_ms: u64| jiff::Timestamp::from_millisecond(unix_ms as i64).unwrap_or_default().to_string();
        let mut body = json!({
            "event": "quota_mark", "id": id, "time": time(self.time_ms), "rule": self.rule, "window": self.window,
            "key": self.key, "client": self.client, "plan": self.plan, "mark": mark, "used": self.used,
            "limit": self.limit, "window_end": time(self.end_ms),
        });
        if self.is_sliding {
            // A sliding window has no end.
            body["window_end"] = Value::Null;
        }
        (id, Bytes::from(body.to_string()))
    }
}
