//! One request for one answer: choosing a server, and trying again where that is safe.
//!
//! Safe means: none of the request was sent (RFC 9110, section 9.2.2 allows that for any method), or
//! it is idempotent, has no body, and went to a connection that had been idle, where the server may
//! have been about to close.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use http::header::TRANSFER_ENCODING;
use http::{HeaderValue, Method, Request, Response};
use hyper::body::Incoming;

use super::carrier::Carrier;
use super::connection::SendError;
use super::download::Download;
use super::pool::Pool;
use super::upload::{Progress, Upload};
use crate::clock::Clock;
use crate::config::Timeouts;
use crate::http::fault::Fault;
use crate::http::upgrade;
use crate::interim::Interim;
use crate::metrics::meter::{UpstreamMeter, UpstreamOutcome};
use crate::timer::Timer;

/// The servers of one upstream, as one event loop sees them.
pub struct Servers {
    pools: Vec<Rc<Pool>>,
    next: Cell<usize>,
    meter: UpstreamMeter,
    clock: Clock,
}

/// Counts a request as given up if it is dropped before it ended otherwise.
struct Count<'a> {
    meter: &'a UpstreamMeter,
    server: usize,
    /// `None` if nothing was sent.
    outcome: Option<UpstreamOutcome>,
}

impl Drop for Count<'_> {
    fn drop(&mut self) {
        if let Some(outcome) = self.outcome {
            self.meter.ended(self.server, outcome);
        }
    }
}

impl Servers {
    pub fn new(pools: Vec<Rc<Pool>>, meter: UpstreamMeter, clock: Clock) -> Servers {
        Servers { pools, next: Cell::new(0), meter, clock }
    }

    /// What Host says to a server when the client said nothing.
    pub fn authority(&self) -> HeaderValue {
        self.pools[0].authority()
    }

    /// Whether they can change over from HTTP/1.1 to another protocol.
    pub fn take_upgrades(&self) -> bool {
        !self.pools[0].is_http2()
    }

    /// Sends a request to one of the servers and returns the head of its answer. The request is boxed
    /// because it is large, and handed from one future to the next.
    pub async fn exchange(
        &self,
        mut request: Box<Request<Upload>>,
        limits: &Timeouts,
        timer: &Timer,
        interim: Option<Rc<Interim>>,
    ) -> Result<Response<Download>, Fault> {
        let progress = request.body().progress();
        let may_repeat = progress.is_none() && is_idempotent(request.method());
        let first = self.turn();
        let alone = matches!(request.body(), Upload::Upgrade);
        let mut fresh = alone;
        loop {
            let idle = if fresh { None } else { self.idle(first) };
            let (server, mut connection, reused) = match idle {
                Some(connection) => (first, connection, true),
                None => Box::pin(self.connection(first, fresh, alone, limits)).await?,
            };
            let spare = may_repeat && reused;
            self.pools[server].address(&mut request);
            let mut count = Count { meter: &self.meter, server, outcome: Some(UpstreamOutcome::Canceled) };
            let started = self.clock.instant();
            let answer = {
                let sending = pin!(connection.send(request, spare, interim.clone()));
                within(limits.response_head, timer, progress.as_deref(), sending).await
            };
            match answer {
                Ok(Ok(response)) if is_clear(&response) => {
                    count.outcome = Some(UpstreamOutcome::Answered);
                    let answered = self.clock.instant();
                    self.meter.answered_in(answered.duration_since(started));
                    connection.answered(answered);
                    let pool = Rc::clone(&self.pools[server]);
                    return Ok(response.map(|body| Download::new(body, connection, pool)));
                }
                Ok(Ok(response)) if alone && upgrade::is_granted(&response) => {
                    count.outcome = Some(UpstreamOutcome::Answered);
                    self.meter.answered_in(self.clock.instant().duration_since(started));
                    let pool = Rc::clone(&self.pools[server]);
                    return Ok(response.map(|body| Download::switched(body, connection, pool)));
                }
                Ok(Ok(_unclear)) => {
                    count.outcome = Some(UpstreamOutcome::Failed);
                    return Err(Fault::Upstream("it switched protocols or coded the transfer unasked".to_owned()));
                }
                Err(fault) => {
                    if fault == Fault::ResponseTimeout {
                        count.outcome = Some(UpstreamOutcome::TimedOut);
                    }
                    return Err(fault);
                }
                Ok(Err(mut error)) => {
                    if let Some(fault) = progress.as_ref().and_then(|progress| progress.fault()) {
                        return Err(fault);
                    }
                    let again = connection.again(error.error(), spare);
                    let unsent = if fresh { None } else { error.take_message() };
                    if reused && let Some(unsent) = unsent {
                        // The server closed the connection while it was idle. There may be others.
                        count.outcome = None;
                        request = Box::new(unsent);
                        continue;
                    }
                    count.outcome = Some(UpstreamOutcome::Failed);
                    let again = again.filter(|_| !fresh).or(unsent);
                    request = Box::new(again.ok_or_else(|| Fault::Upstream(describe(error)))?);
                    // The second try is the last.
                    fresh = true;
                }
            }
        }
    }

    /// Whose turn it is, in round-robin order.
    fn turn(&self) -> usize {
        let turn = self.next.get();
        self.next.set((turn + 1) % self.pools.len());
        turn
    }

    /// Whether a server could not be connected to lately, and there are others to ask first.
    fn is_shunned(&self, server: usize) -> bool {
        self.pools.len() > 1 && self.pools[server].is_shunned()
    }

    /// An idle connection to a server: the usual case, for which nothing need be waited for.
    fn idle(&self, server: usize) -> Option<Carrier> {
        if self.is_shunned(server) { None } else { self.pools[server].take() }
    }

    /// A connection to the first server from `first` on that takes one, and whether it was idle.
    /// Servers that could not be connected to lately come last.
    async fn connection(
        &self,
        first: usize,
        fresh: bool,
        alone: bool,
        limits: &Timeouts,
    ) -> Result<(usize, Carrier, bool), Fault> {
        let mut last = None;
        let in_turn = || (0..self.pools.len()).map(|offset| (first + offset) % self.pools.len());
        let shunned = |server: &usize| self.is_shunned(*server);
        for server in in_turn().filter(|server| !shunned(server)).chain(in_turn().filter(shunned)) {
            let pool = &self.pools[server];
            if let Some(connection) = if fresh { None } else { pool.take() } {
                return Ok((server, connection, true));
            }
            match pool.connect(limits, alone).await {
                Ok(connection) => return Ok((server, connection, false)),
                Err(fault) => {
                    self.meter.ended(server, UpstreamOutcome::ConnectFailed);
                    last = Some(fault);
                }
            }
        }
        Err(last.unwrap_or_else(|| Fault::Connect("the upstream has no servers".to_owned())))
    }
}

/// Whether an answer can be passed on as it is: no other protocol follows, and no coding but chunks.
fn is_clear(response: &Response<Incoming>) -> bool {
    // Known names compare as numbers, so this is less than a look-up in the map.
    let is_coded = response.headers().keys().any(|name| *name == TRANSFER_ENCODING);
    let mut codings = is_coded.then(|| response.headers().get_all(TRANSFER_ENCODING)).into_iter().flatten();
    !upgrade::is_switch(response) && codings.all(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
}

/// Methods whose effect is the same when the request is made twice (RFC 9110, section 9.2.2).
fn is_idempotent(method: &Method) -> bool {
    [Method::GET, Method::HEAD, Method::OPTIONS, Method::PUT, Method::DELETE].contains(method)
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
/// the request's body on its way nor, behind it, the upstream.
async fn within<T>(
    limit: Duration,
    timer: &Timer,
    progress: Option<&Progress>,
    mut answer: Pin<&mut impl Future<Output = T>>,
) -> Result<T, Fault> {
    timer.arm(limit);
    let answer = poll_fn(|cx| {
        if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
            return Poll::Ready(Ok(answer));
        }
        if progress.is_some_and(|progress| progress.moved.take()) {
            timer.arm(limit);
        }
        match timer.poll_up(cx) {
            true if progress.is_some_and(|progress| progress.starved.get()) => Poll::Ready(Err(Fault::BodyTimeout)),
            true => Poll::Ready(Err(Fault::ResponseTimeout)),
            false => Poll::Pending,
        }
    });
    let answer = answer.await;
    timer.disarm();
    answer
}
