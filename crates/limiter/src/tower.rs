//! A [`tower`](https://docs.rs/tower-layer) middleware that limits HTTP requests.
//!
//! [`LimitLayer`] acquires a token of a [`Limiter`] for each request. A request without tokens is answered with 429, and
//! never reaches the service. Responses state the limits in `RateLimit` and `RateLimit-Policy`
//! (draft-ietf-httpapi-ratelimit-headers-11). Lists of these names that the service sent are kept, values in another form, such
//! as that of older drafts, are replaced.
//!
//! ```
//! use std::net::{IpAddr, SocketAddr};
//! use std::time::Duration;
//!
//! use axum::extract::ConnectInfo;
//! use axum::{Router, routing::get};
//! use transom_limiter::Limiter;
//! use transom_limiter::ip_prefix::Network;
//! use transom_limiter::tower::LimitLayer;
//!
//! let limiter = Limiter::builder()
//!     .layer(33, Duration::from_secs(60))
//!     .layer(2000, Duration::from_secs(3600))
//!     .build()?;
//! let per_client = LimitLayer::new("per-client", limiter, |request| {
//!     let ConnectInfo(address) = request.extensions.get::<ConnectInfo<SocketAddr>>()?;
//!     // A client usually has all IPv6 addresses of a /64.
//!     Some(Network::containing(address.ip().to_canonical(), 64))
//! });
//! let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(per_client);
//! # Ok::<(), transom_limiter::BuildError>(())
//! ```

use std::fmt;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::request::Parts;
use http::{Request, Response, StatusCode};
use pin_project_lite::pin_project;
use sfv::{List, ListEntry, Parser};
use tower_layer::Layer;
use tower_service::Service;

use crate::limiter::{Admission, LayerState, Limiter, LimiterDecision, Refusal};
use crate::window::Period;

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const QUOTA_EXCEEDED: &str = "Request cannot be satisfied as assigned quota has been exceeded";
const QUOTA_TOO_SMALL: &str = "Request can never be satisfied as it costs more than the assigned quota";
/// Milliseconds of the periods that have a name, the name, and the unit of their multiples.
const UNITS: [(u128, &str, &str); 4] =
    [(86_400_000, "day", "d"), (3_600_000, "hour", "h"), (60_000, "minute", "m"), (1000, "second", "s")];

type Acquire = dyn Fn(&Limiter, &Parts, u32, &dyn Fn() -> u64) -> Option<LimiterDecision> + Send + Sync;
type Refuse = dyn Fn(&Refusal) -> Response<String> + Send + Sync;

/// Limits the requests of a service.
///
/// All services made by one layer and its clones share the limiter. To share it between several layers, pass an
/// `Arc<Limiter>` to each.
///
/// The body type of the service must implement `From<String>`, as `axum::body::Body` and `http_body_util::Full<Bytes>` do.
#[derive(Clone)]
pub struct LimitLayer {
    settings: Settings,
}

/// The service that [`LimitLayer`] makes.
#[derive(Clone, Debug)]
pub struct LimitService<S> {
    service: S,
    settings: Arc<Settings>,
}

#[derive(Clone)]
struct Settings {
    limiter: Arc<Limiter>,
    acquire: Arc<Acquire>,
    cost: Arc<dyn Fn(&Parts) -> u32 + Send + Sync>,
    count_when: Option<Arc<dyn Fn(StatusCode) -> bool + Send + Sync>>,
    refusal: Arc<Refuse>,
    clock: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// One for each layer of the limiter.
    names: Arc<[String]>,
    policy: HeaderValue,
}

impl LimitLayer {
    /// Limits requests by the key that `key` returns, each at a cost of one token. A request for which it returns `None` is
    /// not limited.
    ///
    /// `name` is the name of the limit in `RateLimit` fields, followed by the period if the limiter has several layers, as in
    /// `per-client-minute`. Characters other than visible ASCII, `"` and `\` are replaced by `_`.
    pub fn new<K: Hash>(
        name: &str,
        limiter: impl Into<Arc<Limiter>>,
        key: impl Fn(&Parts) -> Option<K> + Send + Sync + 'static,
    ) -> LimitLayer {
        let limiter = limiter.into();
        let is_only = limiter.layers().count() == 1;
        let names: Arc<[String]> = limiter.layers().map(|(_, period)| item_name(name, period, is_only)).collect();
        // `w` is in whole seconds, of several windows if need be.
        let policy = list(names.iter().zip(limiter.layers()).map(|(name, (limit, period))| {
            let ms = period.as_millis() as u64;
            let windows = Period::Fixed { ms }.windows().in_whole_seconds();
            format!("\"{name}\";q={};w={}", u64::from(limit) * windows, ms * windows / 1000)
        }));
        let acquire = move |limiter: &Limiter, request: &Parts, cost, clock: &dyn Fn() -> u64| {
            key(request).map(|key| limiter.acquire_with_clock(&key, cost, clock))
        };
        let refused = Arc::clone(&names);
        LimitLayer {
            settings: Settings {
                limiter,
                acquire: Arc::new(acquire),
                cost: Arc::new(|_| 1),
                count_when: None,
                refusal: Arc::new(move |refusal| problem(refusal, &refused[refusal.layer()])),
                clock: Arc::new(unix_ms),
                names,
                policy,
            },
        }
    }

    /// Sets the cost of a request in tokens. A request whose cost exceeds a limit is never admitted.
    pub fn cost(mut self, cost: impl Fn(&Parts) -> u32 + Send + Sync + 'static) -> LimitLayer {
        self.settings.cost = Arc::new(cost);
        self
    }

    /// Counts only requests whose response has a status for which `is_counted` returns `true`, such as failed logins.
    ///
    /// Tokens are acquired before the request is passed on, and refunded when the response does not match: concurrent
    /// requests cannot exceed the limit. If the service fails, or the client disconnects before the response, the request
    /// stays counted.
    pub fn count_when(mut self, is_counted: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> LimitLayer {
        self.settings.count_when = Some(Arc::new(is_counted));
        self
    }

    /// Sets the response to refused requests. `RateLimit`, `RateLimit-Policy` and `Retry-After` are added to it. The default is
    /// 429 with `application/problem+json`.
    pub fn refusal(mut self, response: impl Fn(&Refusal) -> Response<String> + Send + Sync + 'static) -> LimitLayer {
        self.settings.refusal = Arc::new(response);
        self
    }

    /// Sets the clock, in Unix milliseconds. The default is [`SystemTime::now`].
    pub fn clock(mut self, unix_ms: impl Fn() -> u64 + Send + Sync + 'static) -> LimitLayer {
        self.settings.clock = Arc::new(unix_ms);
        self
    }
}

impl<S> Layer<S> for LimitLayer {
    type Service = LimitService<S>;

    fn layer(&self, service: S) -> LimitService<S> {
        LimitService { service, settings: Arc::new(self.settings.clone()) }
    }
}

impl<S, Q, R> Service<Request<Q>> for LimitService<S>
where
    S: Service<Request<Q>, Response = Response<R>>,
    R: From<String>,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = LimitFuture<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> LimitFuture<S::Future> {
        let settings = &*self.settings;
        let (head, body) = request.into_parts();
        let cost = (settings.cost)(&head);
        let decision = (settings.acquire)(&settings.limiter, &head, cost, &*settings.clock);
        let state = match decision {
            Some(LimiterDecision::Refused(refusal)) => State::Refused { refusal: Some(refusal) },
            admitted => {
                let counted = match admitted {
                    Some(LimiterDecision::Admitted(admission)) => Some(Counted { admission, cost }),
                    _ => None,
                };
                State::Forwarded { response: self.service.call(Request::from_parts(head, body)), counted }
            }
        };
        LimitFuture { state, settings: Arc::clone(&self.settings) }
    }
}

#[derive(Debug)]
struct Counted {
    admission: Admission,
    cost: u32,
}

pin_project! {
    /// The response of a [`LimitService`].
    #[derive(Debug)]
    pub struct LimitFuture<F> {
        #[pin]
        state: State<F>,
        settings: Arc<Settings>,
    }
}

pin_project! {
    #[project = StateProjection]
    #[derive(Debug)]
    enum State<F> {
        Forwarded { #[pin] response: F, counted: Option<Counted> },
        Refused { refusal: Option<Refusal> },
    }
}

impl<F, R, E> Future for LimitFuture<F>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: From<String>,
{
    type Output = Result<Response<R>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        match this.state.project() {
            StateProjection::Forwarded { response, counted } => {
                let mut response = ready!(response.poll(context))?;
                if let Some(counted) = counted.take() {
                    this.settings.responded(counted, &mut response);
                }
                Poll::Ready(Ok(response))
            }
            // A future is not polled again after it was ready.
            StateProjection::Refused { refusal } => match refusal.take() {
                Some(refusal) => Poll::Ready(Ok(this.settings.refused(&refusal).map(R::from))),
                None => Poll::Pending,
            },
        }
    }
}

impl Settings {
    /// Refunds a request that is not to be counted, and adds the fields.
    fn responded<R>(&self, counted: Counted, response: &mut Response<R>) {
        let now_ms = (self.clock)();
        let Counted { admission, cost } = counted;
        let is_counted = self.count_when.as_ref().is_none_or(|is_counted| is_counted(response.status()));
        let refunded = if is_counted { 0 } else { cost };
        self.add_fields(admission.layers(), refunded, now_ms, response.headers_mut());
        if !is_counted {
            self.limiter.refund(admission, now_ms);
        }
    }

    fn refused(&self, refusal: &Refusal) -> Response<String> {
        let mut response = (self.refusal)(refusal);
        if let Some(wait) = refusal.retry_after() {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(retry_after_s(wait)));
        }
        self.add_fields(refusal.layers(), 0, (self.clock)(), response.headers_mut());
        response
    }

    fn add_fields(&self, layers: &[LayerState], refunded: u32, now_ms: u64, fields: &mut HeaderMap) {
        let state = list(self.names.iter().zip(layers).map(|(name, layer)| {
            let remaining = layer.remaining.saturating_add(refunded).min(layer.limit);
            let seconds = layer.resets_at_ms.saturating_sub(now_ms).div_ceil(1000);
            format!("\"{name}\";r={remaining};t={seconds}")
        }));
        append_list(fields, RATELIMIT_POLICY, self.policy.clone());
        append_list(fields, RATELIMIT, state);
    }
}

impl fmt::Debug for LimitLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.fmt(f)
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitLayer").field("limiter", &self.limiter).field("names", &self.names).finish_non_exhaustive()
    }
}

/// Adds a line to a list field. Lines of the service that are no list of items, such as `limit=100, remaining=3` of older drafts,
/// are replaced: joined, none of the limits could be read.
fn append_list(fields: &mut HeaderMap, name: HeaderName, value: HeaderValue) {
    let lines = fields.get_all(&name).iter().map(HeaderValue::as_bytes).filter(|line| !line.is_empty());
    let sent = Parser::new(&lines.collect::<Vec<_>>().join(&b", "[..])).parse::<List>().unwrap_or_default();
    if !sent.is_empty() && sent.iter().all(|entry| matches!(entry, ListEntry::Item(_))) {
        fields.append(name, value);
    } else {
        fields.insert(name, value);
    }
}

/// A list of Structured Fields (RFC 9651). Items are visible ASCII, so the conversion succeeds.
fn list(items: impl Iterator<Item = String>) -> HeaderValue {
    let text = items.collect::<Vec<_>>().join(", ");
    HeaderValue::try_from(text).unwrap_or(const { HeaderValue::from_static("") })
}

/// The name of a layer, without quotation marks.
fn item_name(name: &str, period: Duration, is_only: bool) -> String {
    let is_plain = |sign: &char| sign.is_ascii_graphic() && !['"', '\\'].contains(sign);
    let mut text: String = name.chars().map(|sign| Some(sign).filter(is_plain).unwrap_or('_')).collect();
    if !is_only {
        let period_ms = period.as_millis();
        let unit = UNITS.into_iter().find(|(unit_ms, _, _)| period_ms.is_multiple_of(*unit_ms));
        text += &match unit {
            Some((unit_ms, name, _)) if unit_ms == period_ms => format!("-{name}"),
            Some((unit_ms, _, unit)) => format!("-{}{unit}", period_ms / unit_ms),
            None => format!("-{period_ms}ms"),
        };
    }
    text
}

/// RFC 9457, with the problem type of draft-ietf-httpapi-ratelimit-headers-11.
fn problem(refusal: &Refusal, name: &str) -> Response<String> {
    let (title, retry_after) = match refusal.retry_after() {
        Some(wait) => (QUOTA_EXCEEDED, format!(", \"retry-after\": {}", retry_after_s(wait))),
        None => (QUOTA_TOO_SMALL, String::new()),
    };
    let body = format!(
        "{{\"type\": \"https://iana.org/assignments/http-problem-types#quota-exceeded\", \"title\": \"{title}\", \
         \"status\": 429, \"violated-policies\": [\"{name}\"]{retry_after}}}\n"
    );
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    response.headers_mut().insert(CONTENT_TYPE, PROBLEM_JSON);
    response
}

/// `Retry-After` is in whole seconds.
fn retry_after_s(wait: Duration) -> u64 {
    wait.as_millis().div_ceil(1000).max(1) as u64
}

#[allow(
    clippy::disallowed_methods,
    reason = "the default clock of the middleware; the rest of the crate reads no clock"
)]
fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::convert::Infallible;
    use std::future::{Ready, ready};
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

    use super::*;

    /// Responds with the status that the path names, and counts calls.
    #[derive(Clone, Default)]
    struct Statuses(Arc<AtomicUsize>);

    impl Service<Request<()>> for Statuses {
        type Response = Response<String>;
        type Error = Infallible;
        type Future = Ready<Result<Response<String>, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: Request<()>) -> Self::Future {
            self.0.fetch_add(1, Ordering::Relaxed);
            let response = Response::builder().status(&request.uri().path()[1..]).header("RateLimit", "\"other\";r=1");
            ready(Ok(response.body(String::new()).unwrap()))
        }
    }

    fn user(request: &Parts) -> Option<Vec<u8>> {
        request.headers.get("x-user").map(|user| user.as_bytes().to_vec())
    }

    fn limiter() -> Limiter {
        let builder = Limiter::builder().layer(2, Duration::from_secs(60)).layer(3, Duration::from_secs(90));
        builder.capacity(1000).build().unwrap()
    }

    fn send(service: &mut LimitService<Statuses>, user: &str, path: &str) -> Response<String> {
        let request = Request::builder().uri(path).header("x-user", user);
        respond(service, request.body(()).unwrap())
    }

    fn respond(service: &mut LimitService<Statuses>, request: Request<()>) -> Response<String> {
        let mut response = std::pin::pin!(service.call(request));
        match response.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(Ok(response)) => response,
            Poll::Pending => panic!("pending"),
        }
    }

    fn field(response: &Response<String>, name: &str) -> Vec<String> {
        response.headers().get_all(name).iter().map(|value| value.to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn requests_over_the_limit_do_not_reach_the_service() {
        let statuses = Statuses::default();
        let mut service = LimitLayer::new("per user", limiter(), user).clock(|| 60_000).layer(statuses.clone());
        for remaining in [
            "\"per_user-minute\";r=1;t=60, \"per_user-90s\";r=2;t=30",
            "\"per_user-minute\";r=0;t=60, \"per_user-90s\";r=1;t=30",
        ] {
            let response = send(&mut service, "a", "/200");
            assert_eq!(field(&response, "ratelimit"), ["\"other\";r=1", remaining]);
            assert_eq!(
                field(&response, "ratelimit-policy"),
                ["\"per_user-minute\";q=2;w=60, \"per_user-90s\";q=3;w=90"]
            );
        }
        let response = send(&mut service, "a", "/200");
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(field(&response, "retry-after"), ["60"]);
        assert_eq!(field(&response, "ratelimit"), ["\"per_user-minute\";r=0;t=60, \"per_user-90s\";r=1;t=30"]);
        assert_eq!(field(&response, "content-type"), ["application/problem+json"]);
        assert!(response.body().ends_with("\"violated-policies\": [\"per_user-minute\"], \"retry-after\": 60}\n"));
        assert_eq!(send(&mut service, "b", "/200").status(), StatusCode::OK);
        assert_eq!(statuses.0.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn only_lists_of_the_service_are_kept() {
        for (sent, kept) in [
            (&["\"other\";r=1"][..], 1),
            (&["\"a\";r=1", "", "b, \"c\";t=2"], 3),
            (&["limit=100, remaining=3, reset=5"], 0),
            (&["\"a\";r=1", "limit=100"], 0),
            (&["100;w=60, (1 2)"], 0),
            (&["\"a"], 0),
            (&[""], 0),
            (&[], 0),
        ] {
            let mut fields = HeaderMap::new();
            for line in sent {
                fields.append(RATELIMIT, HeaderValue::from_static(line));
            }
            append_list(&mut fields, RATELIMIT, HeaderValue::from_static("\"own\";r=2"));
            let lines: Vec<_> = fields.get_all(RATELIMIT).iter().collect();
            assert_eq!((lines.len(), *lines.last().unwrap()), (kept + 1, &HeaderValue::from_static("\"own\";r=2")));
        }
    }

    #[test]
    fn a_policy_has_whole_seconds() {
        let limiter = Limiter::builder().layer(2, Duration::from_millis(100)).layer(3, Duration::from_millis(1500));
        let layer = LimitLayer::new("a", limiter.capacity(10).build().unwrap(), user).clock(|| 0);
        let response = send(&mut layer.layer(Statuses::default()), "a", "/200");
        assert_eq!(field(&response, "ratelimit-policy"), ["\"a-100ms\";q=20;w=1, \"a-1500ms\";q=6;w=3"]);
    }

    #[test]
    fn a_request_without_a_key_is_not_limited() {
        let mut service = LimitLayer::new("per-user", limiter(), user).clock(|| 0).layer(Statuses::default());
        for _ in 0..9 {
            let response = respond(&mut service, Request::builder().uri("/200").body(()).unwrap());
            assert_eq!((response.status(), field(&response, "ratelimit-policy").len()), (StatusCode::OK, 0));
        }
    }

    #[test]
    fn requests_with_other_statuses_are_refunded() {
        let layer = LimitLayer::new("login", limiter(), user).clock(|| 0).count_when(|status| status == 401);
        let mut service = layer.layer(Statuses::default());
        for _ in 0..9 {
            assert_eq!(
                field(&send(&mut service, "a", "/200"), "ratelimit")[1],
                "\"login-minute\";r=2;t=60, \"login-90s\";r=3;t=90"
            );
        }
        let statuses = [401, 401, 429].map(|_| send(&mut service, "a", "/401").status().as_u16());
        assert_eq!(statuses, [401, 401, 429]);
        assert_eq!(send(&mut service, "a", "/200").status(), StatusCode::TOO_MANY_REQUESTS);
    }

    #[test]
    fn costs_and_refusals_are_configurable_and_layers_share_a_limiter() {
        let limiter = Arc::new(limiter());
        let now_ms = Arc::new(AtomicU64::new(0));
        let layer = || {
            let now_ms = Arc::clone(&now_ms);
            let refusal = |refusal: &Refusal| {
                let text = format!("layer {}", refusal.layer());
                Response::builder().status(503).body(text).unwrap()
            };
            let cost = |request: &Parts| request.uri.query().map_or(1, |query| query.parse().unwrap());
            let clock = move || now_ms.load(Ordering::Relaxed);
            LimitLayer::new("a\"\\é", Arc::clone(&limiter), user).cost(cost).refusal(refusal).clock(clock)
        };
        let (mut first, mut second) = (layer().layer(Statuses::default()), layer().layer(Statuses::default()));
        let response = send(&mut first, "a", "/200?2");
        assert_eq!(field(&response, "ratelimit-policy"), ["\"a___-minute\";q=2;w=60, \"a___-90s\";q=3;w=90"]);
        let refused = send(&mut second, "a", "/200?1");
        assert_eq!((refused.status().as_u16(), refused.body().as_str()), (503, "layer 0"));
        now_ms.store(60_000, Ordering::Relaxed);
        let refused = send(&mut second, "a", "/200?2");
        assert_eq!((field(&refused, "retry-after"), refused.body().as_str()), (vec!["30".to_owned()], "layer 1"));
        let never = send(&mut second, "a", "/200?3");
        assert_eq!(field(&never, "retry-after"), [""; 0]);
        assert_eq!(send(&mut second, "a", "/200?1").status(), StatusCode::OK);
    }

    /// A service that is never ready.
    struct Busy;

    impl Service<Request<()>> for Busy {
        type Response = Response<String>;
        type Error = Infallible;
        type Future = Ready<Result<Response<String>, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Pending
        }

        fn call(&mut self, _: Request<()>) -> Self::Future {
            unreachable!("the service is not ready")
        }
    }

    #[test]
    fn requests_wait_until_the_service_is_ready() {
        let mut service = LimitLayer::new("per-user", limiter(), user).layer(Busy);
        assert!(service.poll_ready(&mut Context::from_waker(std::task::Waker::noop())).is_pending());
    }

    #[test]
    fn the_default_clock_shows_unix_milliseconds() {
        // 2025 and 2109.
        assert!((1_735_689_600_000..4_398_046_511_104).contains(&unix_ms()));
    }

    #[test]
    fn periods_have_their_usual_names() {
        let name = |ms| item_name("x", Duration::from_millis(ms), false);
        assert_eq!(
            [10, 1000, 1500, 10_000, 60_000, 300_000, 3_600_000, 86_400_000, 172_800_000].map(name),
            ["x-10ms", "x-second", "x-1500ms", "x-10s", "x-minute", "x-5m", "x-hour", "x-day", "x-2d"]
        );
        assert_eq!(item_name("x", Duration::from_secs(1), true), "x");
    }
}
