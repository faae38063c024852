//! Forwards one request to a server of an upstream and returns the head of the response; retries where that is safe.
//!
//! A retry is safe if none of the request was sent (RFC 9110, section 9.2.2 allows this for any method), or if the
//! request is idempotent and has no body; and only while nothing of a response was passed on. An idle connection may
//! have been closed by its server just before use: the request is then repeated at once on a new connection, which
//! counts neither as a failure nor as a retry. A retry after a failure to connect is free of the retry budget while
//! another server works: that server gets the request as if it had been chosen first. The budget pays for every other
//! retry. With `hold`, a request that reaches no server waits until one is back.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use http::{Request, Response, StatusCode, header};
use tokio::sync::Notify;

use super::attempt_log::AttemptLog;
use super::connection::{ConnectionError, UpstreamConnection};
use super::hold::{ATTEMPT_PAUSE, HoldQueue, NEXT_SERVER_DELAY, Ticket, Turn};
use super::load_balancer::{Choice, LoadBalancer, RequestTraits, TriedServers};
use super::pool::{ActiveRequest, ConnectionLimitReached, Offer, ServerPool};
use super::request_body::{RequestBody, UploadProgress};
use super::request_limit::RequestPermit;
use super::response_body::{ResponseSource, UpstreamBody};
use super::retry_budget::RetryBudget;
use super::server_health::{AttemptResult, UpstreamHealth};
use crate::informational::InformationalQueue;
use crate::timer::Timer;
use transom_config::ServerId;
use transom_config::limits::Timeouts;
use transom_config::upstream::Retries;
use transom_http::error::RequestError;
use transom_http::{headers, websocket_handshake};
use transom_limiter::handles::IdVec;
use transom_rules::public_location::UrlAuthority;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::events::{UpstreamMetrics, UpstreamOutcome};
use transom_runtime::metrics::upstream::UpstreamLimit;

/// Default number of retries: one for each other server, up to this maximum.
const DEFAULT_RETRIES_MAX: usize = 2;

/// The servers of one upstream, as one worker uses them.
pub struct Forwarder {
    upstream_health: Arc<UpstreamHealth>,
    load_balancer: LoadBalancer,
    retry_budget: RetryBudget,
    metrics: UpstreamMetrics<ServerId>,
    /// With `hold`.
    hold: Option<Rc<Hold>>,
    clock: Clock,
}

/// Where requests to an upstream wait for a server. Its servers may change meanwhile.
#[derive(Default)]
struct Hold {
    queue: Rc<HoldQueue>,
    /// Has the servers of the current configuration.
    current: RefCell<Weak<Forwarder>>,
    /// Notified when `current` changes.
    changed: Notify,
}

/// One request over all its attempts.
struct Forwarding {
    traits: RequestTraits,
    tried: TriedServers,
    /// Retries that remain.
    retries_left: usize,
    /// When the whole request times out (`timeouts.request`).
    deadline: Option<Instant>,
    /// Held where `max_requests` limits the requests in flight at the upstream.
    request_permit: Option<RequestPermit>,
    /// The request was already repeated at this server, so the next attempt opens a new connection.
    needs_new_connection: bool,
    /// The request asks to switch protocols over HTTP/1.1, and needs a connection that no other request will use.
    is_exclusive: bool,
    /// A server may act on what an earlier attempt has sent.
    may_be_sent: bool,
    /// The request was repeated, because another server had the address.
    was_misdirected: bool,
    /// Set once the request waits for a reachable server: its place among others, and the end of the wait.
    held: Option<(Ticket, Instant)>,
}

/// A connection for a request that has waited.
struct HeldConnection {
    connection: UpstreamConnection,
    reused: bool,
    choice: Choice,
    /// Has the server, if the servers of the upstream may have changed.
    forwarder: Option<Rc<Forwarder>>,
}

/// Connects to a server for a request that waits.
type HeldAttempt<'f> = (ServerId, Pin<Box<dyn Future<Output = Result<HeldConnection, RequestError>> + 'f>>);

/// Where a request is sent next.
enum NextAttempt {
    At(Choice),
    /// To a server that becomes reachable. Has the reason.
    WhenReachable(Option<RequestError>),
}

impl Forwarding {
    fn failed(&self, error: RequestError) -> ForwardError {
        let may_be_sent = self.may_be_sent || error.may_follow_forwarding();
        ForwardError { error, may_be_sent, was_held: self.held.is_some() }
    }
}

/// One attempt to get a response from a server. Its drop counts the outcome, and reports the result to the health of the
/// server. The outcome is `Canceled` until another one is set.
struct Attempt<'a> {
    forwarder: &'a Forwarder,
    choice: Choice,
    /// Counts the request in flight at the server. `None` once the response body does so.
    active: Option<ActiveRequest>,
    /// What the drop counts in the metrics. `None`: the attempt is not counted.
    outcome: Option<UpstreamOutcome>,
    result: AttemptResult,
    /// `None` for a request that is neither logged nor traced.
    log: Option<&'a AttemptLog>,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let (forwarder, server) = (self.forwarder, self.choice.server);
        if let Some(outcome) = self.outcome {
            forwarder.metrics.request_ended(server, outcome);
        }
        if let Some(log) = self.log {
            log.attempt_ended(self.outcome, &forwarder.clock);
        }
        forwarder.upstream_health.report(server, self.result, self.choice.reason, || forwarder.clock.instant());
    }
}

impl Attempt<'_> {
    fn set_outcome(&mut self, outcome: UpstreamOutcome, result: AttemptResult) {
        self.outcome = Some(outcome);
        self.result = result;
    }
}

/// Why a request may be retried.
#[derive(Clone, Copy)]
enum RetryCause {
    /// `is_free`: another server works, so the retry takes nothing from the budget.
    Connect {
        is_free: bool,
    },
    Reset,
    Timeout,
    Status(StatusCode),
}

/// Why a request was not answered.
pub struct ForwardError {
    pub error: RequestError,
    /// Whether a server may act on the request.
    pub may_be_sent: bool,
    /// Whether the request has waited for a server.
    pub was_held: bool,
}

impl From<RequestError> for ForwardError {
    fn from(error: RequestError) -> ForwardError {
        ForwardError { may_be_sent: error.may_follow_forwarding(), was_held: false, error }
    }
}

/// What follows an attempt.
enum NextStep {
    Respond(Response<UpstreamBody>),
    /// Send the request again.
    Retry(Choice, Box<Request<RequestBody>>),
    /// Send the request again after a wait.
    Wait(RequestError, Box<Request<RequestBody>>),
    Fail(RequestError),
}

/// Whether a request is retried.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Retry {
    No,
    Now,
    /// Once it has waited for a server: the retry budget is used up.
    AfterWait,
}

impl Forwarder {
    /// Requests that wait with `previous`, the former servers of the same upstream, go on with these servers.
    pub fn new(
        upstream_health: Arc<UpstreamHealth>,
        servers: IdVec<ServerId, Rc<ServerPool>>,
        metrics: UpstreamMetrics<ServerId>,
        clock: Clock,
        previous: Option<&Forwarder>,
    ) -> Rc<Forwarder> {
        let (budget, budget_min) =
            upstream_health.policy.retries.as_ref().map_or((0, 0), |retries| (retries.budget, retries.budget_min));
        let former_hold = previous.and_then(|previous| previous.hold.clone());
        let forwarder = Rc::new(Forwarder {
            retry_budget: RetryBudget::new(budget, budget_min, upstream_health.workers),
            load_balancer: LoadBalancer::new(&upstream_health, servers),
            hold: upstream_health.policy.hold.map(|_| former_hold.clone().unwrap_or_default()),
            upstream_health,
            metrics,
            clock,
        });
        if let Some(hold) = former_hold.as_ref().or(forwarder.hold.as_ref()) {
            hold.current.replace(Rc::downgrade(&forwarder));
            hold.changed.notify_waiters();
        }
        forwarder
    }

    pub fn upstream_health(&self) -> &Arc<UpstreamHealth> {
        &self.upstream_health
    }

    /// Adds Host to a request with neither Host nor `:authority`.
    pub fn add_host(&self, request: &mut Request<RequestBody>) {
        if request.uri().authority().is_none()
            && let Some(first) = self.load_balancer.servers().get(ServerId::FIRST)
            && let header::Entry::Vacant(host) = request.headers_mut().entry(header::HOST)
        {
            host.insert(first.pool.authority());
        }
    }

    /// Whether this is a server of the upstream, also of the current configuration, or the host that it is sent. Port 0:
    /// any.
    pub fn has_server(&self, authority: UrlAuthority<'_>) -> bool {
        let has_name = |forwarder: &Forwarder| {
            forwarder.load_balancer.servers().iter().any(|server| server.pool.has_name(authority))
        };
        let current = || self.hold.as_ref()?.current.borrow().upgrade();
        has_name(self) || current().is_some_and(|current| has_name(&current))
    }

    /// Sends a request to one of the servers and returns the head of the response. The request is boxed because it is
    /// large and passed from one future to the next. Not an `async` function, because that would store its arguments
    /// twice.
    pub fn forward(
        &self,
        mut request: Box<Request<RequestBody>>,
        traits: RequestTraits,
        limits: &Timeouts,
        timer: &Timer,
        informational: Option<Rc<InformationalQueue>>,
        attempt_log: Option<Rc<AttemptLog>>,
    ) -> impl Future<Output = Result<Response<UpstreamBody>, ForwardError>> {
        let progress = request.body().progress();
        let must_wait = self.must_wait();
        let mut forwarding = self.begin(traits, limits, must_wait);
        async move {
            let forwarding = forwarding.as_mut().map_err(|error| error.clone())?;
            let mut next = match must_wait {
                true => NextAttempt::WhenReachable(None),
                false => NextAttempt::At(self.load_balancer.choose_first(&self.upstream_health, traits, &self.clock)),
            };
            // Has the current servers, if they may have changed while the request waited.
            let mut current: Option<Rc<Forwarder>> = None;
            loop {
                let (choice, mut held) = match next {
                    NextAttempt::At(choice) => (choice, None),
                    NextAttempt::WhenReachable(failure) => {
                        let forwarder = current.as_deref().unwrap_or(self);
                        let waiting = forwarder.wait_for_server(forwarding, limits, attempt_log.as_deref(), failure);
                        let mut held = Box::pin(waiting).await?;
                        current = held.forwarder.take().or(current);
                        current.iter().for_each(|forwarder| forwarder.add_host(&mut request));
                        (held.choice, Some(held))
                    }
                };
                let forwarder = current.as_deref().unwrap_or(self);
                let server = &forwarder.load_balancer.servers()[choice.server];
                if let Some(log) = &attempt_log {
                    log.attempt_began(choice.server, request.headers_mut(), &self.clock);
                }
                let mut attempt = Attempt {
                    forwarder,
                    choice,
                    active: Some(server.begin_request()),
                    outcome: Some(UpstreamOutcome::Canceled),
                    result: AttemptResult::Unknown,
                    log: attempt_log.as_deref(),
                };
                let (mut connection, reused);
                if let Some(held) = held.take() {
                    (connection, reused) = (held.connection, held.reused);
                } else if let Some(idle) = (!forwarding.needs_new_connection && !forwarding.is_exclusive)
                    .then(|| server.pool.take_ready())
                    .flatten()
                {
                    (connection, reused) = (idle, true);
                } else {
                    match Box::pin(forwarder.connect(server, forwarding, limits)).await {
                        Ok(connected) => (connection, reused) = connected,
                        Err(error) => {
                            next = match forwarder.on_connect_failure(forwarding, attempt, error) {
                                Ok(choice) => NextAttempt::At(choice),
                                Err(error) if forwarder.hold.is_some() && error != RequestError::Overloaded => {
                                    NextAttempt::WhenReachable(Some(error))
                                }
                                Err(error) => return Err(forwarding.failed(error)),
                            };
                            continue;
                        }
                    }
                }
                let limit = forwarder
                    .attempt_timeout(forwarding)
                    .map_or(limits.response_head, |limit| limit.min(limits.response_head));
                server.pool.set_host(&mut request);
                connection.prepare_request(&mut request);
                let started = self.clock.instant();
                let response = {
                    let sending = pin!(connection.send(request, informational.clone()));
                    forwarder.await_response(limit, forwarding.deadline, timer, progress.as_deref(), sending).await
                };
                let step = match response {
                    Ok(Ok(response)) => forwarder.on_response(forwarding, attempt, connection, response, started),
                    Ok(Err(error)) => match progress.as_ref().and_then(|progress| progress.client_error()) {
                        Some(error) => NextStep::Fail(error),
                        None => {
                            // A request that may be repeated is, once, if another server has got the address.
                            let is_misdirected = forwarding.traits.is_repeatable
                                && !(reused || forwarding.was_misdirected)
                                && error.is_closed_without_response()
                                && Box::pin(server.pool.has_moved(connection.address())).await;
                            if is_misdirected {
                                forwarding.was_misdirected = true;
                                forwarding.needs_new_connection = false;
                            }
                            let is_stale = reused || is_misdirected;
                            forwarder.on_connection_error(forwarding, attempt, connection, error, is_stale)
                        }
                    },
                    Err(error) => {
                        if matches!(error, RequestError::ResponseTimeout | RequestError::RequestTimeout) {
                            attempt.set_outcome(UpstreamOutcome::TimedOut, AttemptResult::Failure);
                        }
                        forwarder.on_timeout(forwarding, attempt, connection, error)
                    }
                };
                (next, request) = match step {
                    NextStep::Respond(response) => return Ok(response),
                    NextStep::Fail(error) => return Err(forwarding.failed(error)),
                    NextStep::Retry(choice, replay) => (NextAttempt::At(choice), replay),
                    NextStep::Wait(error, replay) => (NextAttempt::WhenReachable(Some(error)), replay),
                };
            }
        }
    }

    /// Whether a new request waits at once: there is no server, or other requests have waited longer.
    fn must_wait(&self) -> bool {
        let has_servers = || self.load_balancer.servers().get(ServerId::FIRST).is_some();
        self.hold.as_ref().is_some_and(|hold| hold.queue.is_in_use() || !has_servers())
    }

    /// Whether the request needs a connection that no other request will use.
    fn needs_exclusive(&self, traits: RequestTraits) -> bool {
        let first = self.load_balancer.servers().get(ServerId::FIRST);
        traits.is_upgrade && first.is_some_and(|first| !first.pool.is_http2())
    }

    /// A permit where `max_requests` limits the requests in flight at the upstream. `Err`: there are too many.
    fn request_permit(&self) -> Result<Option<RequestPermit>, RequestError> {
        let Some(max) = self.upstream_health.policy.max_requests else { return Ok(None) };
        self.upstream_health.request_limit.acquire_request(max).map(Some).ok_or(RequestError::Overloaded)
    }

    /// Admits a request, unless there is no server, or too many are in flight. A request that waits is not in flight.
    fn begin(&self, traits: RequestTraits, limits: &Timeouts, must_wait: bool) -> Result<Forwarding, RequestError> {
        let permit = match must_wait {
            true => None,
            false if self.load_balancer.servers().is_empty() => return Err(RequestError::NoServer),
            false => self.request_permit().map_err(|_many| self.reject(UpstreamLimit::Requests))?,
        };
        self.retry_budget.add_request();
        // The only server, too, gets a request again that waits for it.
        let default = || match &self.hold {
            Some(_) => DEFAULT_RETRIES_MAX,
            None => DEFAULT_RETRIES_MAX.min(self.load_balancer.servers().len() - 1),
        };
        let attempts = |retries: &Retries| retries.attempts.map_or_else(default, |attempts| attempts as usize);
        let left = self.upstream_health.policy.retries.as_ref().map_or(0, attempts);
        let deadline = limits.request.map(|limit| self.clock.instant() + limit);
        Ok(Forwarding {
            traits,
            tried: TriedServers::new(),
            retries_left: left,
            deadline,
            request_permit: permit,
            needs_new_connection: false,
            is_exclusive: self.needs_exclusive(traits),
            may_be_sent: false,
            was_misdirected: false,
            held: None,
        })
    }

    fn reject(&self, limit: UpstreamLimit) -> RequestError {
        self.metrics.retries.refused(limit);
        RequestError::Overloaded
    }

    /// The timeout of one attempt, where a retry is possible.
    fn attempt_timeout(&self, forwarding: &Forwarding) -> Option<Duration> {
        self.upstream_health.policy.retries.as_ref()?.try_timeout.filter(|_| forwarding.traits.is_repeatable)
    }

    fn connect_timeout(&self, forwarding: &Forwarding, limits: &Timeouts) -> Duration {
        let limits =
            [Some(limits.connect), self.attempt_timeout(forwarding), time_left(forwarding.deadline, &self.clock)];
        limits.into_iter().flatten().min().unwrap_or(Duration::ZERO)
    }

    /// Opens a connection. At the connection limit, waits for the first connection that becomes free, or for the permit
    /// of one that closes. Returns the connection and whether it was in use before.
    async fn connect(
        &self,
        server: &Rc<ServerPool>,
        forwarding: &Forwarding,
        limits: &Timeouts,
    ) -> Result<(UpstreamConnection, bool), RequestError> {
        let limit = self.connect_timeout(forwarding, limits);
        let mut permit = server.acquire_permit();
        if permit.is_err() && forwarding.is_exclusive {
            // Idle connections are useless to this request, and would hold their permits for as long as they are idle.
            server.pool.close_oldest_idle();
            permit = server.acquire_permit();
        }
        let permit = match permit {
            Ok(permit) => permit,
            Err(ConnectionLimitReached) => {
                if !forwarding.is_exclusive
                    && let Some(stream) = server.pool.open_stream(1)
                {
                    return Ok((stream, true));
                }
                let Some(_pending) =
                    self.upstream_health.request_limit.acquire_pending(self.upstream_health.policy.max_pending)
                else {
                    return Err(self.reject(UpstreamLimit::Pending));
                };
                let _waiting = self.metrics.retries.count_waiting();
                match tokio::time::timeout(limit, server.enqueue(!forwarding.is_exclusive)).await {
                    Ok(Ok(Offer::Connection(connection))) => return Ok((connection, true)),
                    Ok(Ok(Offer::Permit(permit))) => Some(permit),
                    Ok(Err(_)) | Err(_) => return Err(self.reject(UpstreamLimit::ConnectWait)),
                }
            }
        };
        let ping_after = limits.body.min(limits.response_head) / 2;
        // A connection with a permit is not left to the pool without a request that holds it.
        let (client, is_exclusive) = (forwarding.traits.client, forwarding.is_exclusive);
        let connecting = server.pool.connect(client, limit, ping_after, is_exclusive, permit.is_none());
        let mut connection = connecting.await.inspect_err(|_failure| self.upstream_health.suspect_servers())?;
        connection.set_permit(permit);
        if let UpstreamConnection::Http2(_) = connection {
            server.serve_stream_waiters();
        }
        Ok((connection, false))
    }

    /// Waits until a server is reachable, and returns a connection to it. `failure`: of the attempt before.
    async fn wait_for_server(
        &self,
        forwarding: &mut Forwarding,
        limits: &Timeouts,
        log: Option<&AttemptLog>,
        failure: Option<RequestError>,
    ) -> Result<HeldConnection, ForwardError> {
        let Some((hold, limit)) = self.hold.as_ref().zip(self.upstream_health.policy.hold) else {
            return Err(forwarding.failed(failure.unwrap_or(RequestError::NoServer)));
        };
        let (hold, queue, began) = (Rc::clone(hold), &hold.queue, self.clock.instant());
        if let Some(failure) = failure {
            queue.connect_failed(failure.operator_message(), began);
        }
        let (ticket, until) = *forwarding.held.get_or_insert_with(|| (queue.new_ticket(), began + limit));
        // It is not in flight.
        forwarding.request_permit = None;
        let may_be_sent = forwarding.may_be_sent;
        let failed = |error| ForwardError { error, may_be_sent, was_held: true };
        let unreachable = |of, why: &str| {
            self.metrics.retries.refused(of);
            let retry_after_s = limit.as_secs() + u64::from(limit.subsec_nanos() > 0);
            failed(RequestError::Unreachable { retry_after_s, cause: format!("{why}: {}", queue.last_failure()) })
        };
        let (request_limit, max) = (&self.upstream_health.request_limit, self.upstream_health.policy.max_held);
        let Some(permit) = request_limit.acquire_held(max) else {
            return Err(unreachable(UpstreamLimit::Held, "`max_held` requests wait already"));
        };
        let upstream = &self.upstream_health.name;
        if request_limit.may_log_wait(self.upstream_health.elapsed_ms(began)) {
            let for_ms = limit.as_millis() as u64;
            tracing::warn!(upstream, for_ms, "no server is reachable, requests wait: {}", queue.last_failure());
        }
        let counted = self.metrics.retries.count_held();
        let end = forwarding.deadline.map_or(until, |deadline| until.min(deadline));
        let connecting = self.connect_when_reachable(&hold, ticket, forwarding, limits);
        let connected = tokio::time::timeout(end.saturating_duration_since(began), connecting).await;
        drop((permit, counted));
        let waited = self.clock.instant().saturating_duration_since(began);
        if let Some(log) = log {
            log.held.update(|before| before + waited);
        }
        match connected {
            Ok(Ok(connected)) => {
                if let Some((log, forwarder)) = log.zip(connected.forwarder.as_ref()) {
                    log.use_servers(&forwarder.upstream_health);
                }
                if request_limit.held() == 0 && request_limit.end_logged_wait() {
                    let waited_ms = waited.as_millis() as u64;
                    tracing::info!(upstream, waited_ms, "a server is reachable, no request waits any longer");
                }
                Ok(connected)
            }
            Ok(Err(error)) => Err(failed(error)),
            Err(_elapsed) if end < until => Err(failed(RequestError::RequestTimeout)),
            Err(_elapsed) => Err(unreachable(UpstreamLimit::HoldTime, "the time of `hold` is over")),
        }
    }

    /// Waits for the turns of a request, and connects to one of the current servers. Fails only if a server works but has too
    /// many connections.
    async fn connect_when_reachable(
        &self,
        hold: &Hold,
        ticket: Ticket,
        forwarding: &mut Forwarding,
        limits: &Timeouts,
    ) -> Result<HeldConnection, RequestError> {
        let (mut turn, mut tried) = (None, std::mem::take(&mut forwarding.tried));
        loop {
            let changed = hold.changed.notified();
            let current = hold.current.borrow().upgrade();
            let forwarder = current.as_deref().unwrap_or(self);
            if !std::ptr::eq(forwarder, self) {
                tried.clear();
            }
            forwarding.is_exclusive = forwarder.needs_exclusive(forwarding.traits);
            let connecting = forwarder.connect_in_turn(&hold.queue, ticket, &mut turn, &mut tried, forwarding, limits);
            let (connected, permit) = tokio::select! {
                biased;
                connected = connecting => connected?,
                // Other servers may be reachable.
                () = changed => continue,
            };
            hold.queue.connected();
            (forwarding.tried, forwarding.request_permit) = (tried, permit);
            // What an earlier server did with a connection says nothing about this one.
            forwarding.needs_new_connection = false;
            return Ok(HeldConnection { forwarder: current, ..connected });
        }
    }

    /// Tries one server after the other while the request has the turn. An attempt at a server that does not answer goes on
    /// beside the next one, and the first connection is used.
    async fn connect_in_turn(
        &self,
        queue: &Rc<HoldQueue>,
        ticket: Ticket,
        turn: &mut Option<Turn>,
        tried: &mut TriedServers,
        forwarding: &Forwarding,
        limits: &Timeouts,
    ) -> Result<(HeldConnection, Option<RequestPermit>), RequestError> {
        let (mut attempts, mut permit, mut wait) = (Vec::new(), None, Duration::ZERO);
        loop {
            if turn.is_none() {
                *turn = Some(queue.turn(ticket).await);
                wait = queue.pause(self.clock.instant());
            }
            let ended = match wait.is_zero() {
                true => None,
                false => tokio::time::timeout(wait, first_ended(&mut attempts)).await.ok(),
            };
            let connected = match ended {
                Some(ended) => ended.map(Some),
                None => self.begin_attempt(forwarding, limits, tried, &mut attempts, &mut permit),
            };
            match connected {
                Ok(Some(connected)) => return Ok((connected, permit.flatten())),
                Ok(None) if permit.is_some() => {
                    wait = NEXT_SERVER_DELAY;
                    continue;
                }
                // `max_requests` are in flight.
                Ok(None) => {}
                Err(RequestError::Overloaded) => return Err(RequestError::Overloaded),
                Err(error) => queue.connect_failed(error.operator_message(), self.clock.instant()),
            }
            wait = ATTEMPT_PAUSE;
            if !queue.keeps_turn(ticket) {
                attempts.clear();
                *turn = None;
            }
            if attempts.is_empty() {
                permit = None;
            }
        }
    }

    /// Begins to connect to the next server for a request that waits. Returns an idle connection, if there is one.
    /// `permit` stays `None` if too many requests are in flight.
    fn begin_attempt<'f>(
        &'f self,
        forwarding: &'f Forwarding,
        limits: &'f Timeouts,
        tried: &mut TriedServers,
        attempts: &mut Vec<HeldAttempt<'f>>,
        permit: &mut Option<Option<RequestPermit>>,
    ) -> Result<Option<HeldConnection>, RequestError> {
        let (health, servers) = (&self.upstream_health, self.load_balancer.servers());
        if servers.is_empty() {
            health.suspect_servers();
            return Err(RequestError::NoServer);
        }
        if permit.is_none() {
            *permit = self.request_permit().ok();
        }
        let is_busy = |server: ServerId| attempts.iter().any(|(busy, _)| *busy == server);
        if permit.is_none() || servers.ids().all(is_busy) {
            return Ok(None);
        }
        if tried.len() >= servers.len() {
            tried.retain(|server| is_busy(*server));
        }
        let mut choice = self.load_balancer.choose_next(health, forwarding.traits, tried, self.clock.instant());
        if is_busy(choice.server)
            && let Some(other) = servers.ids().find(|server| !is_busy(*server))
        {
            choice = self.load_balancer.choice(other);
        }
        tried.push(choice.server);
        let server = &servers[choice.server];
        let connected = move |(connection, reused)| HeldConnection { connection, reused, choice, forwarder: None };
        if !forwarding.is_exclusive
            && let Some(idle) = std::iter::from_fn(|| server.pool.take_ready()).find_map(ready)
        {
            return Ok(Some(connected((idle, true))));
        }
        let connecting = async move { self.connect(server, forwarding, limits).await.map(connected) };
        attempts.push((choice.server, Box::pin(connecting)));
        Ok(None)
    }

    /// Handles a failure to connect: nothing was sent, so any request can go to another server.
    fn on_connect_failure(
        &self,
        forwarding: &mut Forwarding,
        mut attempt: Attempt<'_>,
        error: RequestError,
    ) -> Result<Choice, RequestError> {
        if error == RequestError::Overloaded {
            attempt.outcome = None;
            return Err(error);
        }
        attempt.set_outcome(UpstreamOutcome::ConnectFailed, AttemptResult::Failure);
        let server = attempt.choice.server;
        let is_free =
            self.load_balancer.has_other(&self.upstream_health, server, &forwarding.tried, self.clock.instant());
        // A request that can wait for a server needs no retry at one that does not work.
        let may_retry = is_free || self.hold.is_none();
        if may_retry && self.retry(forwarding, RetryCause::Connect { is_free }) == Retry::Now {
            Ok(self.next_server(forwarding, attempt))
        } else {
            Err(error)
        }
    }

    fn on_response(
        &self,
        forwarding: &mut Forwarding,
        mut attempt: Attempt<'_>,
        mut connection: UpstreamConnection,
        mut response: Response<()>,
        started: Instant,
    ) -> NextStep {
        let is_switched = forwarding.traits.is_upgrade && websocket_handshake::accepts_websocket(&response);
        let is_switch = websocket_handshake::is_switching_protocols(&response);
        let status = response.status();
        let violation = match headers::forward_response(response.headers_mut(), status) {
            false => Some("its Content-Length or Transfer-Encoding is malformed, or there are several"),
            true if is_switch && !is_switched => Some("it switched protocols without a request to do so"),
            true => None,
        };
        if let Some(why) = violation {
            attempt.set_outcome(UpstreamOutcome::Failed, AttemptResult::Failure);
            return NextStep::Fail(RequestError::Upstream(why.to_owned()));
        }
        if let Some(log) = attempt.log {
            log.responded(response.status());
        }
        let responded_at = self.clock.instant();
        self.metrics.responded_in(responded_at.duration_since(started));
        connection.on_response_head(responded_at);
        attempt.set_outcome(UpstreamOutcome::Responded, self.result_of_status(response.status()));
        let replay = if forwarding.traits.is_repeatable
            && self.retry(forwarding, RetryCause::Status(response.status())) == Retry::Now
        {
            connection.take_replay()
        } else {
            None
        };
        let Some(active) = attempt.active.take() else { return NextStep::Fail(RequestError::Panic) };
        match replay {
            None => {
                let source = ResponseSource { connection, active, request_permit: forwarding.request_permit.take() };
                let deadline = forwarding.deadline;
                NextStep::Respond(response.map(|()| match is_switched {
                    true => UpstreamBody::upgraded(source),
                    false => UpstreamBody::new(source, deadline),
                }))
            }
            Some(request) => {
                // A response without a body leaves a connection that can be used again.
                drop(UpstreamBody::new(ResponseSource { connection, active, request_permit: None }, None));
                forwarding.may_be_sent = true;
                NextStep::Retry(self.next_server(forwarding, attempt), request)
            }
        }
    }

    fn result_of_status(&self, status: StatusCode) -> AttemptResult {
        let ejection = self.upstream_health.policy.ejection.as_ref();
        if ejection.is_some_and(|ejection| ejection.statuses.contains(&status.as_u16())) {
            AttemptResult::Failure
        } else {
            AttemptResult::Success
        }
    }

    /// Handles a connection that ended, or a malformed response.
    fn on_connection_error(
        &self,
        forwarding: &mut Forwarding,
        mut attempt: Attempt<'_>,
        mut connection: UpstreamConnection,
        error: ConnectionError,
        reused: bool,
    ) -> NextStep {
        if !reused && error.is_closed_without_response() {
            self.load_balancer.servers()[attempt.choice.server].pool.mark_suspect();
            self.upstream_health.suspect_servers();
        }
        if let Some(unsent) = connection.take_unsent() {
            if reused || !forwarding.needs_new_connection {
                // The server closed the connection before it was used. Other idle connections may work.
                attempt.outcome = if reused { None } else { Some(UpstreamOutcome::Failed) };
                forwarding.needs_new_connection |= !reused;
                return NextStep::Retry(attempt.choice, unsent);
            }
            attempt.set_outcome(UpstreamOutcome::Failed, AttemptResult::Failure);
            let error = RequestError::Upstream(error.to_string());
            return match self.retry(forwarding, RetryCause::Reset) {
                Retry::Now => NextStep::Retry(self.next_server(forwarding, attempt), unsent),
                Retry::AfterWait => NextStep::Wait(error, unsent),
                // Nothing was sent.
                Retry::No if self.hold.is_some() => NextStep::Wait(error, unsent),
                Retry::No => NextStep::Fail(error),
            };
        }
        let replay = connection.take_retryable(&error, forwarding.traits.is_repeatable);
        forwarding.may_be_sent |= !error.is_unprocessed();
        // The server has stated that it did not process the request, which may therefore be sent again.
        if (reused || error.is_unprocessed())
            && !forwarding.needs_new_connection
            && let Some(request) = replay
        {
            attempt.outcome = Some(UpstreamOutcome::Failed);
            forwarding.needs_new_connection = true;
            return NextStep::Retry(attempt.choice, request);
        }
        attempt.set_outcome(UpstreamOutcome::Failed, AttemptResult::Failure);
        let error = RequestError::Upstream(error.to_string());
        let Some(request) = replay else { return NextStep::Fail(error) };
        match self.retry(forwarding, RetryCause::Reset) {
            Retry::Now => NextStep::Retry(self.next_server(forwarding, attempt), request),
            Retry::AfterWait => NextStep::Wait(error, request),
            Retry::No => NextStep::Fail(error),
        }
    }

    /// Handles a response head that did not arrive in time.
    fn on_timeout(
        &self,
        forwarding: &mut Forwarding,
        attempt: Attempt<'_>,
        mut connection: UpstreamConnection,
        error: RequestError,
    ) -> NextStep {
        let is_try = error == RequestError::ResponseTimeout && self.attempt_timeout(forwarding).is_some();
        forwarding.may_be_sent = true;
        match is_try.then(|| connection.take_replay()).flatten() {
            Some(request) if self.retry(forwarding, RetryCause::Timeout) == Retry::Now => {
                NextStep::Retry(self.next_server(forwarding, attempt), request)
            }
            _ => NextStep::Fail(error),
        }
    }

    /// Whether the request is retried; if so, takes the retry from the budget, unless it is free.
    fn retry(&self, forwarding: &mut Forwarding, cause: RetryCause) -> Retry {
        let Some(Retries { on, .. }) = &self.upstream_health.policy.retries else { return Retry::No };
        let is_cause = match cause {
            RetryCause::Connect { .. } => on.connect_failure,
            RetryCause::Reset => on.reset,
            RetryCause::Timeout => on.timeout,
            RetryCause::Status(status) => on.statuses.contains(&status.as_u16()),
        };
        if !is_cause || forwarding.retries_left == 0 {
            return Retry::No;
        }
        let now = self.clock.instant();
        if forwarding.deadline.is_some_and(|deadline| deadline <= now) {
            return Retry::No;
        }
        let mut retry = Retry::Now;
        if !matches!(cause, RetryCause::Connect { is_free: true }) && !self.retry_budget.try_spend(now) {
            self.metrics.retries.over_budget();
            if self.hold.is_none() || !matches!(cause, RetryCause::Reset) {
                return Retry::No;
            }
            retry = Retry::AfterWait;
        }
        forwarding.retries_left -= 1;
        self.metrics.retries.retried();
        retry
    }

    /// Chooses the server for the next attempt. The result of the last attempt is reported first.
    fn next_server(&self, forwarding: &mut Forwarding, attempt: Attempt<'_>) -> Choice {
        forwarding.tried.push(attempt.choice.server);
        forwarding.needs_new_connection = false;
        drop(attempt);
        self.load_balancer.choose_next(
            &self.upstream_health,
            forwarding.traits,
            &forwarding.tried,
            self.clock.instant(),
        )
    }

    /// Waits for a response while the exchange makes progress: neither the request body nor, after it, the server may be
    /// idle for `limit`, and `deadline` ends the wait. Not an `async` function, because that would store its arguments
    /// twice: the future of every request contains this one.
    fn await_response<T>(
        &self,
        limit: Duration,
        deadline: Option<Instant>,
        timer: &Timer,
        progress: Option<&UploadProgress>,
        mut response: Pin<&mut impl Future<Output = T>>,
    ) -> impl Future<Output = Result<T, RequestError>> {
        timer.arm(time_left(deadline, &self.clock).map_or(limit, |left| limit.min(left)));
        poll_fn(move |cx| {
            if let Poll::Ready(response) = response.as_mut().poll(cx) {
                timer.disarm();
                return Poll::Ready(Ok(response));
            }
            if progress.is_some_and(|progress| progress.has_moved.take()) {
                timer.arm(time_left(deadline, &self.clock).map_or(limit, |left| limit.min(left)));
            }
            if !timer.poll_expired(cx) {
                return Poll::Pending;
            }
            timer.disarm();
            Poll::Ready(Err(match progress {
                _ if time_left(deadline, &self.clock) == Some(Duration::ZERO) => RequestError::RequestTimeout,
                Some(progress) if progress.is_starved.get() => RequestError::BodyTimeout,
                Some(_) | None => RequestError::ResponseTimeout,
            }))
        })
    }
}

/// The result of the attempt that ends first. Never ready without attempts.
async fn first_ended(attempts: &mut Vec<HeldAttempt<'_>>) -> Result<HeldConnection, RequestError> {
    poll_fn(|cx| {
        let ended = attempts.iter_mut().enumerate().find_map(|(at, (_, attempt))| match attempt.as_mut().poll(cx) {
            Poll::Ready(ended) => Some((at, ended)),
            Poll::Pending => None,
        });
        let Some((at, ended)) = ended else { return Poll::Pending };
        drop(attempts.swap_remove(at));
        Poll::Ready(ended)
    })
    .await
}

/// A connection from the pool, if its server has not closed it.
fn ready(mut connection: UpstreamConnection) -> Option<UpstreamConnection> {
    connection.is_ready().then_some(connection)
}

/// The time until the whole request times out.
fn time_left(deadline: Option<Instant>, clock: &Clock) -> Option<Duration> {
    deadline.map(|deadline| deadline.saturating_duration_since(clock.instant()))
}
