//! The hallway: the whole life of one request.
//!
//! `passing` is a request on its way, `snapshot` the configuration made ready, `hall` what an event loop keeps between
//! requests, `turn` the wait for a window to come, `again` a request that was refused and is asked once more,
//! `allowance` how large a body may be, `settlement` a cost that the answer tells, `record` what is written down of a
//! request, `complaints` how often the operator is told of failures, `body` the body of an answer on its way out,
//! `question` what the store of shared counters is asked,
//! `opening` the end of a handshake, `passage` the tunnel behind an answer that opens one.

use std::cell::OnceCell;
use std::num::NonZeroU64;
use std::ops::Range;
use std::rc::Rc;

use http::request::Parts;
use http::uri::{PathAndQuery, Uri};
use http::{Request, Response, Version, header};
use http_body::Body as _;

mod admission;
mod body_limits;
pub mod compiled_config;
pub mod delayed_request;
pub mod log_throttle;
pub mod repeat_refusal;
pub mod request_record;
pub mod response_body;
pub mod response_cost;
pub mod response_future;
pub mod tunnel_session;
mod websocket;
pub mod worker_state;

use crate::clock::Moment;
use crate::config::ForwardPath;
use crate::http::error::RequestError;
use crate::http::forwarded::Client;
use crate::http::headers::SpecialFields;
use crate::http::rate_limit_key::{Caller, Unclear};
use crate::http::request_validation::Clear;
use crate::http::responses::{ErrorFormat, Reply};
use crate::http::route_actions::{AppliedActions, Seen};
use crate::http::router::{self, Ambiguous};
use crate::http::websocket_handshake::UpgradeMethod;
use crate::http::{headers, path_normalize, request_validation, responses};
use crate::upstream::echo;
use crate::upstream::load_balancer::Asked;
use crate::upstream::request_body::{BodySource, Inbound};
use crate::upstream::request_upload::Upload;
use admission::{Admission, Judged, PendingAdmission, Rejection};
use compiled_config::CompiledConfig;
use repeat_refusal::Again;
use request_record::Record;
use response_body::{Body, Content};
use response_future::ResponseFuture;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use websocket::{WebSocketHandshake, conclude};
use worker_state::{ConnectionInfo, Peer, Scratch, Target, WorkerConfig, WorkerState};

/// What the rules made of a request.
enum RequestOutcome {
    /// As permitted, or by what a question comes to that has to be asked first.
    Forward { onward: ForwardPlan, permit: Admission, question: Option<Box<PendingAdmission>> },
    /// A refusal, or another answer that needs no upstream.
    Answer(Reply),
}

/// Where a request goes, and what is done to it there.
struct ForwardPlan {
    lane: usize,
    /// It asks for a WebSocket.
    opening: Option<Box<WebSocketHandshake>>,
    /// What the choice of a server goes by, where requests that belong together go to one.
    server_key: Option<NonZeroU64>,
    deed: Option<Box<AppliedActions>>,
    /// What it is answered with instead of being sent on: some of its rules could not be applied, and it was held to the others.
    fault: Option<Box<RequestError>>,
}

/// Who asks, and when.
struct RequestContext<'a> {
    peer: &'a Peer,
    client: Client,
    /// As far as the head tells.
    body_bytes: u64,
    now: Moment,
}

/// Takes a request from its head to the head of its answer. `doubts` are told the marks of its fields, and say what
/// is wrong with it that only its bytes tell.
pub fn pass(
    worker: &Rc<WorkerState>,
    peer: &Rc<Peer>,
    request: Request<impl Into<BodySource>>,
    doubts: impl FnOnce(SpecialFields) -> Option<RequestError>,
) -> ResponseFuture {
    let now = worker.clock.now();
    let view = worker.view();
    peer.body_limit.set(view.snapshot.config.timeouts.body);
    let (mut parts, body) = request.into_parts();
    let body = Inbound::new(body, &parts.headers, peer.unwanted.as_ref());
    let dialect = ErrorFormat::of(&parts);
    let client = client(&view.snapshot, peer, &parts);
    let mut record = Record::new(worker, &view, client.address, &parts, now);
    let visitor = RequestContext { peer, client, body_bytes: body.size_hint().lower(), now };
    let (mut onward, permit, question) = match decide(worker, &view, &visitor, &mut parts, doubts, &mut record) {
        Ok(RequestOutcome::Forward { onward, permit, question }) => (onward, permit, question),
        Ok(RequestOutcome::Answer(reply)) => {
            return ResponseFuture::Done(Some(finish(dialect.refusal(reply).map(Content::from), record)));
        }
        Err(fault) => return ResponseFuture::Done(Some(fail(&fault, dialect, record))),
    };
    // Each by itself, so that the future below has room for each only once.
    let Admission { mut stamp, mut turn, mut settlement } = permit;
    let bounds = || body_limits::bounds(worker, &view.snapshot, onward.lane);
    let upload = if onward.opening.is_some() { Upload::Upgrade } else { Upload::new(body, bounds) };
    let (peer, worker) = (Rc::clone(peer), Rc::clone(worker));
    let request = Box::new(Request::from_parts(parts, upload));
    // What is seldom waited for has a future by itself: each request's would have room for it.
    ResponseFuture::Forward(Box::pin(async move {
        if let Some(question) = question {
            match Box::pin(question.answer(&worker, &view, &peer, &mut record)).await {
                Ok(permit) => Admission { stamp, turn, settlement } = permit,
                Err(denial) => return deny(denial, dialect, record),
            }
        }
        if let Some(turn) = turn.take() {
            stamp = match Box::pin(turn.come(&mut record, &mut settlement)).await {
                Ok(stamp) => stamp,
                Err(denial) => return deny(denial, dialect, record),
            };
        }
        let mut answer = match forward(&view, &peer, &mut onward, request, &mut record).await {
            Ok(answer) => {
                if let Some(settlement) = settlement {
                    stamp = settlement.settle(&worker, &view, answer.headers()).unwrap_or(stamp);
                }
                if let Some(opening) = onward.opening.take() {
                    return ResponseFuture::Forward(Box::pin(async move {
                        let mut answer = conclude(answer, opening, dialect, record, &peer, &view).await;
                        stamp.put(answer.headers_mut());
                        ResponseFuture::Done(Some(answer))
                    }));
                }
                finish(answer, record)
            }
            Err(fault) => fail(&fault, dialect, record),
        };
        // A request that was admitted has consumed, whatever became of it.
        stamp.put(answer.headers_mut());
        ResponseFuture::Done(Some(answer))
    }))
}

#[cold]
fn deny(denial: Rejection, dialect: ErrorFormat, record: Record) -> ResponseFuture {
    ResponseFuture::Done(Some(match denial {
        Rejection::Refused(reply) => finish(dialect.refusal(reply).map(Content::from), record),
        Rejection::Fault(fault) => fail(&fault, dialect, record),
    }))
}

fn fail(fault: &RequestError, dialect: ErrorFormat, mut record: Record) -> Response<Body> {
    record.fault(fault);
    finish(dialect.fault(fault).map(Content::from), record)
}

fn finish(answer: Response<Content>, mut record: Record) -> Response<Body> {
    record.answer(answer.status().as_u16());
    answer.map(|content| Body::new(content, record))
}

/// Who asks: whoever opened the connection or, if that is a proxy that is trusted, whom it names.
fn client(snapshot: &CompiledConfig, peer: &Peer, parts: &Parts) -> Client {
    let ConnectionInfo { address, is_secure, .. } = *peer.origin;
    match &snapshot.trust {
        None => Client { address, is_secure, told: None },
        Some(trust) => trust.client(address, is_secure, &parts.headers),
    }
}

/// Finds the route, identifies the caller, charges, judges. Nothing is waited for.
fn decide(
    worker: &Rc<WorkerState>,
    view: &Rc<WorkerConfig>,
    visitor: &RequestContext<'_>,
    parts: &mut Parts,
    doubts: impl FnOnce(SpecialFields) -> Option<RequestError>,
    record: &mut Record,
) -> Result<RequestOutcome, RequestError> {
    let (snapshot, now) = (&*view.snapshot, visitor.now);
    if parts.version != Version::HTTP_11 {
        request_validation::translate(parts)?;
    }
    let clear = request_validation::check(parts)?;
    if let Some(fault) = doubts(clear.marks) {
        return Err(fault);
    }
    let path = match parts.uri.path() {
        "*" => return Ok(RequestOutcome::Answer(responses::options())),
        path => path_normalize::normalize(path, snapshot.config.path_reading)?,
    };
    let mut scratch = view.scratch();
    let Scratch { context, params, text, last } = &mut *scratch;
    let lane_index = find(snapshot, visitor, parts, &clear, &path, params, record)?;
    let lane = &snapshot.lanes[lane_index];
    let slate = snapshot.slate_of(lane);
    let caller = Caller {
        address: visitor.client.address,
        client_cert: visitor.peer.origin.client_cert.as_deref(),
        host: &clear.host,
        method: &parts.method,
        path: &path,
        params,
        uri: &parts.uri,
        headers: &parts.headers,
        route: snapshot.name_of(lane_index),
        tokens: &view.tokens,
        wall_ms: snapshot.config.jwt.as_ref().map_or(0, |_| worker.clock.wall_ms()),
        clients: snapshot.clients.as_ref(),
        plan: OnceCell::new(),
    };
    let fault = match identify(view, lane_index, &caller, context) {
        // No rule has a key to charge.
        Some(fault) if context.inputs.keyed_requests.iter().all(Option::is_none) => return Err(fault),
        fault => fault.map(Box::new),
    };
    let action = snapshot.action_of(lane).filter(|_| fault.is_none());
    let deed = action.map(|action| action.of(&Seen::of(&caller, visitor.client.is_secure))).transpose()?;
    let (permit, question) =
        match admission::judge(worker, snapshot, lane.slate as usize, &caller, context, now.unix_ms)? {
            Judged::Later(question) => (Admission::default(), Some(question)),
            Judged::Now(judgement) => {
                worker.meter.decided(worker.clock.instant().duration_since(now.instant));
                record.decision(lane.slate as usize, context, &judgement);
                if let Decision::Refused = judgement {
                    let again =
                        Again::of(view, visitor.peer, lane_index, context, parts, clear.marks, visitor.body_bytes);
                    visitor.peer.again.replace(again);
                    let headers = std::mem::take(&mut parts.headers);
                    let slate = lane.slate as usize;
                    let work_out =
                        || view.refusal(slate, context, context.result.decided_ms, worker.date(), text, headers);
                    return Ok(RequestOutcome::Answer(last.refusal(
                        slate,
                        context.result.decided_ms,
                        context,
                        work_out,
                    )));
                }
                let policy = view.policies[lane.slate as usize].as_ref();
                let stamp = slate.sheet.render(context, policy, context.result.decided_ms, text);
                let texts = || snapshot.texts_of(slate, &caller);
                (Admission::of(judgement, stamp, worker, view, visitor.peer, lane.slate as usize, context, texts), None)
            }
        };
    let onward = ForwardPlan { lane: lane_index, opening: None, server_key: None, deed, fault };
    if onward.fault.is_some() {
        return Ok(RequestOutcome::Forward { onward, permit, question });
    }
    let affinity = snapshot.affinities.get(lane.upstream as usize).and_then(Option::as_ref);
    let server_key = affinity.and_then(|affinity| affinity.of(&caller));
    let (marks, websocket) = (clear.marks, clear.websocket);
    let normalized = (snapshot.config.forward_path == ForwardPath::Normalized).then(|| path.into_owned());
    let onward = ForwardPlan { server_key, ..onward };
    let onward = onward.made_ready(view, parts, visitor, marks, websocket, normalized)?;
    Ok(RequestOutcome::Forward { onward, permit, question })
}

/// Finds the route of a request, which must take what is asked and what comes with it.
fn find(
    snapshot: &CompiledConfig,
    visitor: &RequestContext<'_>,
    parts: &Parts,
    clear: &Clear<'_>,
    path: &str,
    params: &mut Vec<Range<usize>>,
    record: &mut Record,
) -> Result<usize, RequestError> {
    let (host, secure) = (&*clear.host, visitor.client.is_secure);
    let asked = router::Asked { host, method: &parts.method, headers: &parts.headers, path, secure };
    let found = snapshot.router.find(&asked, params);
    let lane =
        found.map_err(|Ambiguous(field)| RequestError::RouteField(field.clone()))?.ok_or(RequestError::NoRoute)?;
    record.route(lane);
    if clear.websocket == Some(UpgradeMethod::Connect) && !snapshot.config.routes[lane].websocket {
        return Err(RequestError::NO_WEBSOCKET);
    }
    body_limits::admit(snapshot, snapshot.action_of(&snapshot.lanes[lane]), visitor.body_bytes)?;
    Ok(lane)
}

impl ForwardPlan {
    /// Makes the head ready for the upstream; `path` is the one that goes there, if it is neither the client's nor one that
    /// the route has made.
    fn made_ready(
        mut self,
        view: &WorkerConfig,
        parts: &mut Parts,
        visitor: &RequestContext<'_>,
        marks: SpecialFields,
        websocket: Option<UpgradeMethod>,
        path: Option<String>,
    ) -> Result<ForwardPlan, RequestError> {
        let snapshot = &*view.snapshot;
        let upstream = snapshot.lanes[self.lane].upstream as usize;
        let takes_upgrades = || view.targets.get(upstream).is_some_and(Target::takes_upgrades);
        self.opening = WebSocketHandshake::of(websocket, &parts.headers, || {
            snapshot.config.routes[self.lane].websocket && takes_upgrades()
        })?;
        let peer = &visitor.peer.origin.text;
        headers::forward_request(&mut parts.headers, marks, peer, &visitor.client, &snapshot.key_fields);
        let path = self.deed.as_mut().and_then(|deed| deed.path.take()).or(path);
        if let Some(deed) = &mut self.deed {
            deed.to_request(&mut parts.headers);
        }
        if path.is_some() || parts.uri.authority().is_some() {
            parts.uri = origin_form(&parts.uri, path)?;
        }
        if let Some(opening) = &self.opening {
            opening.ask(&mut parts.headers);
        }
        Ok(self)
    }
}

/// Finds the keys that the rules of a route count a request by. Returns what is wrong with the request if some rule could not
/// be applied; the others are to be charged for it all the same.
fn identify(
    view: &WorkerConfig,
    lane: usize,
    caller: &Caller<'_>,
    context: &mut DecisionContext,
) -> Option<RequestError> {
    let snapshot = &*view.snapshot;
    let slate = snapshot.slate_of(&snapshot.lanes[lane]);
    let mut first_fault = None;
    context.inputs.keyed_requests.clear();
    for (position, identity) in slate.identities.iter().enumerate() {
        context.inputs.keyed_requests.push(match identity.of(caller) {
            Ok(keyed_request) => keyed_request,
            // A rule that is only tried out refuses nobody, for whatever reason.
            Err(_) if snapshot.rule_set.is_shadow(&slate.charge_plan, position) => {
                view.meters[lane].shadowed(position);
                None
            }
            Err(Unclear { fault, keyed_request }) => {
                first_fault.get_or_insert(fault);
                keyed_request
            }
        });
    }
    first_fault
}

/// The target as it goes upstream: path and query only, which can not name another host.
fn origin_form(uri: &Uri, path: Option<String>) -> Result<Uri, RequestError> {
    let target = match (path, uri.path_and_query()) {
        (Some(path), _) => {
            let text = uri.query().map_or_else(|| path.clone(), |query| format!("{path}?{query}"));
            PathAndQuery::from_maybe_shared(text)
                .map_err(|_invalid| RequestError::Target("the request target is malformed"))?
        }
        (None, Some(target)) => target.clone(),
        (None, None) => PathAndQuery::from_static("/"),
    };
    let mut parts = http::uri::Parts::default();
    parts.path_and_query = Some(target);
    Uri::from_parts(parts).map_err(|_invalid| RequestError::Target("the request target is malformed"))
}

/// Sends a request on, and makes the answer ready for the client.
async fn forward(
    view: &WorkerConfig,
    peer: &Peer,
    onward: &mut ForwardPlan,
    mut request: Box<Request<Upload>>,
    record: &mut Record,
) -> Result<Response<Content>, RequestError> {
    if let Some(fault) = onward.fault.take() {
        return Err(*fault);
    }
    let snapshot = &*view.snapshot;
    let lane = &snapshot.lanes[onward.lane];
    let action = snapshot.action_of(lane);
    let timeouts = action.and_then(|action| action.timeouts.as_ref()).unwrap_or(&snapshot.config.timeouts);
    peer.body_limit.set(timeouts.body);
    if let Some(reply) = onward.deed.as_mut().and_then(|deed| deed.reply.take()) {
        return Ok(changed(reply.map(Content::from), onward.deed.take()));
    }
    let upstream = lane.upstream as usize;
    record.upstream(&snapshot.config.upstreams[upstream].name);
    let answer = match &view.targets[upstream] {
        Target::Echo => Box::pin(echo::answer(*request, timeouts.body, &peer.timer)).await?.map(Content::from),
        Target::Servers(servers) => {
            // HTTP/1.0 knows no informational answers.
            let interim = (request.version() >= Version::HTTP_11).then(|| Rc::clone(&peer.interim));
            // Only older clients may leave Host out.
            if interim.is_none() && !request.headers().contains_key(header::HOST) {
                request.headers_mut().insert(header::HOST, servers.authority());
            }
            *request.version_mut() = Version::HTTP_11;
            let asked = Asked::of(&request, onward.server_key);
            let mut answer = servers.exchange(request, asked, timeouts, &peer.timer, interim).await?;
            *answer.version_mut() = Version::HTTP_11;
            answer.map(Content::from)
        }
    };
    Ok(changed(answer, onward.deed.take()))
}

/// An answer with the changes that its route makes.
fn changed(mut answer: Response<Content>, deed: Option<Box<AppliedActions>>) -> Response<Content> {
    if let Some(deed) = deed {
        deed.to_response(answer.headers_mut());
    }
    answer
}
