//! One request for one answer: on which server, how long, and whether it is tried again.
//!
//! Trying again must be safe: none of the request was sent (RFC 9110, section 9.2.2 allows that for
//! any method), or it is idempotent and has no body; and nothing of an answer was passed on. A
//! connection that had been idle may have been closed by its server just then: that is repeated at
//! once, on a new connection, and is nobody's failure. A try that follows a failure to connect costs nothing where
//! another server works: that server gets the request once, as if it had been chosen first. Every other further try is
//! paid for.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use http::{HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;

use super::connection::UpstreamConnection;
use super::http1::SendError;
use super::http2;
use super::load_balancer::{Asked, Balancer, Choice, Tried};
use super::request_limit::RequestPermit;
use super::request_upload::{Upload, UploadProgress};
use super::response_body::{Download, ResponseSource};
use super::retry_budget::Budget;
use super::server_health::{AttemptResult, UpstreamHealth};
use super::server_pool::{ActiveRequest, Full, Offer, ServerPool};
use crate::clock::Clock;
use crate::config::Timeouts;
use crate::http::error::RequestError;
use crate::http::{headers, websocket_handshake};
use crate::informational::InformationalQueue;
use crate::metrics::events::{UpstreamMetrics, UpstreamOutcome};
use crate::metrics::upstream::{RetryMetrics, UpstreamLimit};
use crate::timer::Timer;

/// Further tries where the configuration does not say: one for each other server, and at most so many.
const ATTEMPTS: usize = 2;

/// The servers of one upstream, as one event loop sees them.
pub struct Servers {
    upstream_health: Arc<UpstreamHealth>,
    balancer: Balancer,
    budget: Budget,
    meter: UpstreamMetrics,
    retries: RetryMetrics,
    clock: Clock,
}

/// One request, over all its tries.
struct Forwarding {
    asked: Asked,
    tried: Tried,
    /// How often it may be tried again.
    left: usize,
    /// When it ends, come what may.
    ends: Option<Instant>,
    /// Its place among those that the upstream takes at a time.
    ticket: Option<RequestPermit>,
    /// Whether it has been repeated on a new connection to the server it is at.
    fresh: bool,
    /// It asks for another protocol over HTTP/1.1, and so for a connection that no other request will use.
    alone: bool,
}

/// One try: its outcome is counted and its sign told when it is dropped. Dropped before it ended
/// otherwise, it was given up.
struct Attempt<'a> {
    servers: &'a Servers,
    choice: Choice,
    /// `None` once the answer has it.
    visit: Option<ActiveRequest>,
    /// `None` if nothing was sent.
    outcome: Option<UpstreamOutcome>,
    sign: AttemptResult,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let (servers, server) = (self.servers, self.choice.server);
        if let Some(outcome) = self.outcome {
            servers.meter.request_ended(server, outcome);
        }
        servers.upstream_health.report(server, self.sign, self.choice.chosen, || servers.clock.instant());
    }
}

impl Attempt<'_> {
    fn ended(&mut self, outcome: UpstreamOutcome, sign: AttemptResult) {
        self.outcome = Some(outcome);
        self.sign = sign;
    }
}

/// Why something may be tried again.
#[derive(Clone, Copy)]
enum Cause {
    /// `is_free`: a server that works is left, and gets the request as if it had been chosen first.
    Connect {
        is_free: bool,
    },
    Reset,
    Timeout,
    Status(StatusCode),
}

/// What follows a try.
enum Next {
    Answer(Response<Download>),
    /// The request once more.
    Again(Choice, Box<Request<Upload>>),
    Fault(RequestError),
}

impl Servers {
    pub fn new(
        upstream_health: Arc<UpstreamHealth>,
        places: Vec<Rc<ServerPool>>,
        meter: UpstreamMetrics,
        retries: RetryMetrics,
        clock: Clock,
    ) -> Servers {
        let policy = &upstream_health.policy.retries;
        Servers {
            budget: Budget::new(policy.budget, policy.budget_min, upstream_health.loops),
            balancer: Balancer::new(&upstream_health, places),
            upstream_health,
            meter,
            retries,
            clock,
        }
    }

    /// What Host says to a server when the client said nothing.
    pub fn authority(&self) -> HeaderValue {
        self.balancer.places()[0].pool.authority()
    }

    /// Sends a request to one of the servers and returns the head of its answer. The request is boxed
    /// because it is large, and handed from one future to the next. No `async` function, which would keep its
    /// arguments twice.
    pub fn exchange(
        &self,
        mut request: Box<Request<Upload>>,
        asked: Asked,
        limits: &Timeouts,
        timer: &Timer,
        interim: Option<Rc<InformationalQueue>>,
    ) -> impl Future<Output = Result<Response<Download>, RequestError>> {
        let progress = request.body().progress();
        let mut course = self.course(asked, limits);
        async move {
            let course = course.as_mut().map_err(|fault| fault.clone())?;
            let mut choice = self.balancer.first(&self.upstream_health, course.asked, &self.clock);
            loop {
                let place = &self.balancer.places()[choice.server];
                let mut attempt = Attempt {
                    servers: self,
                    choice,
                    visit: Some(place.visit()),
                    outcome: Some(UpstreamOutcome::Canceled),
                    sign: AttemptResult::None,
                };
                let (mut connection, reused);
                if let Some(idle) = (!course.fresh && !course.alone).then(|| place.pool.take()).flatten() {
                    (connection, reused) = (idle, true);
                } else {
                    match Box::pin(self.connect(place, course, limits)).await {
                        Ok(connected) => (connection, reused) = connected,
                        Err(fault) => {
                            choice = self.unreached(course, attempt, fault)?;
                            continue;
                        }
                    }
                }
                let limit =
                    self.try_timeout(course).map_or(limits.response_head, |limit| limit.min(limits.response_head));
                place.pool.address(&mut request);
                connection.address(&mut request);
                let started = self.clock.instant();
                let answer = {
                    let sending = pin!(connection.send(request, course.asked.repeatable, interim.clone()));
                    within(limit, course.ends, &self.clock, timer, progress.as_deref(), sending).await
                };
                let next = match answer {
                    Ok(Ok(response)) => self.answered(course, attempt, connection, response, started),
                    Ok(Err(error)) => match progress.as_ref().and_then(|progress| progress.fault()) {
                        Some(fault) => Next::Fault(fault),
                        None => self.broken(course, attempt, connection, error, reused),
                    },
                    Err(fault) => {
                        if matches!(fault, RequestError::ResponseTimeout | RequestError::RequestTimeout) {
                            attempt.ended(UpstreamOutcome::TimedOut, AttemptResult::Bad);
                        }
                        self.late(course, attempt, connection, fault)
                    }
                };
                match next {
                    Next::Answer(answer) => return Ok(answer),
                    Next::Fault(fault) => return Err(fault),
                    Next::Again(next, again) => (choice, request) = (next, again),
                }
            }
        }
    }

    /// Lets a request in, if there are not too many.
    fn course(&self, asked: Asked, limits: &Timeouts) -> Result<Forwarding, RequestError> {
        let ticket = match self.upstream_health.policy.circuit.max_requests {
            None => None,
            Some(max) => match self.upstream_health.circuit.request(max) {
                None => return Err(self.refuse(UpstreamLimit::Requests)),
                ticket => ticket,
            },
        };
        self.budget.earn();
        let default = || ATTEMPTS.min(self.balancer.places().len() - 1);
        let left = self.upstream_health.policy.retries.attempts.map_or_else(default, |attempts| attempts as usize);
        let ends = limits.request.map(|limit| self.clock.instant() + limit);
        let alone = asked.handshake && !self.balancer.places()[0].pool.is_http2();
        Ok(Forwarding { asked, tried: Tried::new(), left, ends, ticket, fresh: false, alone })
    }

    fn refuse(&self, limit: UpstreamLimit) -> RequestError {
        self.retries.refused(limit);
        RequestError::Overloaded
    }

    /// How long one try may take, where there could be another.
    fn try_timeout(&self, course: &Forwarding) -> Option<Duration> {
        self.upstream_health.policy.retries.try_timeout.filter(|_| course.asked.repeatable)
    }

    fn connect_limit(&self, course: &Forwarding, limits: &Timeouts) -> Duration {
        let limits = [Some(limits.connect), self.try_timeout(course), left(course.ends, &self.clock)];
        limits.into_iter().flatten().min().unwrap_or(Duration::ZERO)
    }

    /// A new connection. Where their number is limited and reached, the first that becomes free, which
    /// then was in use before.
    async fn connect(
        &self,
        place: &Rc<ServerPool>,
        course: &Forwarding,
        limits: &Timeouts,
    ) -> Result<(UpstreamConnection, bool), RequestError> {
        let limit = self.connect_limit(course, limits);
        let mut room = place.room();
        if room.is_err() && course.alone {
            // Those that lie idle are no use to it, and would keep the room for as long as they do.
            place.pool.close_one();
            room = place.room();
        }
        let slot = match room {
            Ok(slot) => slot,
            Err(Full) => {
                if !course.alone
                    && let Some(crowded) = place.pool.share(1)
                {
                    return Ok((crowded, true));
                }
                let Some(_pending) =
                    self.upstream_health.circuit.pending(self.upstream_health.policy.circuit.max_pending)
                else {
                    return Err(self.refuse(UpstreamLimit::Pending));
                };
                match tokio::time::timeout(limit, place.queue(!course.alone)).await {
                    Ok(Ok(Offer::Carrier(carrier))) => return Ok((carrier, true)),
                    Ok(Ok(Offer::Room(slot))) => Some(slot),
                    Ok(Err(_)) | Err(_) => return Err(self.refuse(UpstreamLimit::ConnectWait)),
                }
            }
        };
        let quiet = limits.body.min(limits.response_head) / 2;
        // One that has taken room is not left behind without a request that holds the room.
        let mut carrier = place.pool.connect(limit, quiet, course.alone, slot.is_none()).await?;
        carrier.occupy(slot);
        if let UpstreamConnection::Shared(_) = carrier {
            place.invite();
        }
        Ok((carrier, false))
    }

    /// No connection: nothing was sent, so any request can go elsewhere.
    fn unreached(
        &self,
        course: &mut Forwarding,
        mut attempt: Attempt<'_>,
        fault: RequestError,
    ) -> Result<Choice, RequestError> {
        if fault == RequestError::Overloaded {
            attempt.outcome = None;
            return Err(fault);
        }
        attempt.ended(UpstreamOutcome::ConnectFailed, AttemptResult::Bad);
        let server = attempt.choice.server;
        let is_free = self.balancer.has_other(&self.upstream_health, server, &course.tried, self.clock.instant());
        if self.may_try_again(course, Cause::Connect { is_free }) { Ok(self.next(course, attempt)) } else { Err(fault) }
    }

    fn answered(
        &self,
        course: &mut Forwarding,
        mut attempt: Attempt<'_>,
        mut connection: UpstreamConnection,
        mut response: Response<Incoming>,
        started: Instant,
    ) -> Next {
        let is_switched = course.asked.handshake && websocket_handshake::is_granted(&response);
        let is_switch = websocket_handshake::is_switch(&response);
        let unclear = match headers::forward_response(response.headers_mut()) {
            false => Some("its Content-Length or Transfer-Encoding is malformed, or there are several"),
            true if is_switch && !is_switched => Some("it switched protocols unasked"),
            true => None,
        };
        if let Some(why) = unclear {
            attempt.ended(UpstreamOutcome::Failed, AttemptResult::Bad);
            return Next::Fault(RequestError::Upstream(why.to_owned()));
        }
        let answered = self.clock.instant();
        self.meter.responded_in(answered.duration_since(started));
        connection.answered(answered);
        attempt.ended(UpstreamOutcome::Answered, self.sign_of(response.status()));
        let again = if course.asked.repeatable && self.may_try_again(course, Cause::Status(response.status())) {
            connection.sent()
        } else {
            None
        };
        let Some(visit) = attempt.visit.take() else { return Next::Fault(RequestError::Panic) };
        match again {
            None => {
                let source = ResponseSource { connection, visit, ticket: course.ticket.take() };
                let ends = course.ends;
                Next::Answer(response.map(|body| match is_switched {
                    true => Download::switched(body, source),
                    false => Download::new(body, source, ends),
                }))
            }
            Some(request) => {
                // An answer without a body leaves a connection that can be used again.
                drop(Download::new(response.into_body(), ResponseSource { connection, visit, ticket: None }, None));
                Next::Again(self.next(course, attempt), Box::new(request))
            }
        }
    }

    fn sign_of(&self, status: StatusCode) -> AttemptResult {
        let ejection = self.upstream_health.policy.ejection.as_ref();
        if ejection.is_some_and(|ejection| ejection.statuses.contains(&status.as_u16())) {
            AttemptResult::Bad
        } else {
            AttemptResult::Good
        }
    }

    /// The connection ended, or what came was no answer.
    fn broken(
        &self,
        course: &mut Forwarding,
        mut attempt: Attempt<'_>,
        mut connection: UpstreamConnection,
        mut error: SendError,
        reused: bool,
    ) -> Next {
        let unsent = error.take_message().map(Box::new);
        if let Some(unsent) = unsent {
            if reused || !course.fresh {
                // The server closed the connection before it was used. There may be others.
                attempt.outcome = if reused { None } else { Some(UpstreamOutcome::Failed) };
                course.fresh |= !reused;
                return Next::Again(attempt.choice, unsent);
            }
            attempt.ended(UpstreamOutcome::Failed, AttemptResult::Bad);
            return match self.may_try_again(course, Cause::Reset) {
                true => Next::Again(self.next(course, attempt), unsent),
                false => Next::Fault(RequestError::Upstream(describe(error))),
            };
        }
        let again = connection.again(error.error(), course.asked.repeatable);
        // A server that says it has not looked at a request wants it elsewhere.
        if (reused || http2::is_unprocessed(error.error()))
            && !course.fresh
            && let Some(request) = again
        {
            attempt.outcome = Some(UpstreamOutcome::Failed);
            course.fresh = true;
            return Next::Again(attempt.choice, Box::new(request));
        }
        attempt.ended(UpstreamOutcome::Failed, AttemptResult::Bad);
        match again {
            Some(request) if self.may_try_again(course, Cause::Reset) => {
                Next::Again(self.next(course, attempt), Box::new(request))
            }
            _ => Next::Fault(RequestError::Upstream(describe(error))),
        }
    }

    /// The answer did not come in time.
    fn late(
        &self,
        course: &mut Forwarding,
        attempt: Attempt<'_>,
        mut connection: UpstreamConnection,
        fault: RequestError,
    ) -> Next {
        let is_try = fault == RequestError::ResponseTimeout && self.try_timeout(course).is_some();
        match is_try.then(|| connection.sent()).flatten() {
            Some(request) if self.may_try_again(course, Cause::Timeout) => {
                Next::Again(self.next(course, attempt), Box::new(request))
            }
            _ => Next::Fault(fault),
        }
    }

    /// Whether there is another try; if so, it is paid for, unless it is free.
    fn may_try_again(&self, course: &mut Forwarding, cause: Cause) -> bool {
        let retries = &self.upstream_health.policy.retries;
        let is_cause = match cause {
            Cause::Connect { .. } => retries.on_connect_failure,
            Cause::Reset => retries.on_reset,
            Cause::Timeout => retries.on_timeout,
            Cause::Status(status) => retries.on_statuses.contains(&status.as_u16()),
        };
        if !is_cause || course.left == 0 {
            return false;
        }
        let now = self.clock.instant();
        if course.ends.is_some_and(|ends| ends <= now) {
            return false;
        }
        if !matches!(cause, Cause::Connect { is_free: true }) && !self.budget.spend(now) {
            self.retries.over_budget();
            return false;
        }
        course.left -= 1;
        self.retries.retried();
        true
    }

    /// Where to try it next. What became of the try before is told first.
    fn next(&self, course: &mut Forwarding, attempt: Attempt<'_>) -> Choice {
        course.tried.push(attempt.choice.server as u32);
        course.fresh = false;
        drop(attempt);
        self.balancer.next(&self.upstream_health, course.asked, &course.tried, self.clock.instant())
    }
}

fn describe(error: SendError) -> String {
    use std::error::Error;
    let error = error.into_error();
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// Waits for an answer as long as the exchange moves: nothing may stand still for `limit`, neither
/// the request's body on its way nor, behind it, the upstream; and at `ends` it is over. No `async`
/// function, which would keep its arguments twice: every request's future has room for this one.
fn within<T>(
    limit: Duration,
    ends: Option<Instant>,
    clock: &Clock,
    timer: &Timer,
    progress: Option<&UploadProgress>,
    mut answer: Pin<&mut impl Future<Output = T>>,
) -> impl Future<Output = Result<T, RequestError>> {
    timer.arm(left(ends, clock).map_or(limit, |left| limit.min(left)));
    poll_fn(move |cx| {
        if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
            timer.disarm();
            return Poll::Ready(Ok(answer));
        }
        if progress.is_some_and(|progress| progress.moved.take()) {
            timer.arm(left(ends, clock).map_or(limit, |left| limit.min(left)));
        }
        if !timer.poll_expired(cx) {
            return Poll::Pending;
        }
        timer.disarm();
        Poll::Ready(Err(match progress {
            _ if left(ends, clock) == Some(Duration::ZERO) => RequestError::RequestTimeout,
            Some(progress) if progress.starved.get() => RequestError::BodyTimeout,
            Some(_) | None => RequestError::ResponseTimeout,
        }))
    })
}

/// The time until a request ends, come what may.
fn left(ends: Option<Instant>, clock: &Clock) -> Option<Duration> {
    ends.map(|ends| ends.saturating_duration_since(clock.instant()))
}
