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

use crate::clock::Timestamp;
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
use admission::{Admission, Evaluation, PendingAdmission, Rejection};
use compiled_config::CompiledConfig;
use repeat_refusal::RepeatRefusal;
use request_record::RequestRecord;
use response_body::{Content, ResponseBody};
use response_future::ResponseFuture;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use websocket::{WebSocketHandshake, finish_handshake};
use worker_state::{ConnectionInfo, Peer, Scratch, Target, WorkerConfig, WorkerState};

/// What the rules made of a request.
enum RequestOutcome {
    /// As permitted, or by what a question comes to that has to be asked first.
    Forward { plan: ForwardPlan, admission: Admission, pending: Option<Box<PendingAdmission>> },
    /// A refusal, or another answer that needs no upstream.
    Respond(Reply),
}

/// Where a request goes, and what is done to it there.
struct ForwardPlan {
    route: usize,
    /// It asks for a WebSocket.
    websocket: Option<Box<WebSocketHandshake>>,
    /// What the choice of a server goes by, where requests that belong together go to one.
    server_key: Option<NonZeroU64>,
    actions: Option<Box<AppliedActions>>,
    /// What it is answered with instead of being sent on: some of its rules could not be applied, and it was held to the others.
    error: Option<Box<RequestError>>,
}

/// Who asks, and when.
struct RequestContext<'a> {
    peer: &'a Peer,
    client: Client,
    /// As far as the head tells.
    body_bytes: u64,
    now: Timestamp,
}

/// Takes a request from its head to the head of its answer. `doubts` are told the marks of its fields, and say what
/// is wrong with it that only its bytes tell.
pub fn handle(
    worker: &Rc<WorkerState>,
    peer: &Rc<Peer>,
    request: Request<impl Into<BodySource>>,
    doubts: impl FnOnce(SpecialFields) -> Option<RequestError>,
) -> ResponseFuture {
    let now = worker.clock.now();
    let view = worker.config();
    peer.body_timeout.set(view.compiled.config.timeouts.body);
    let (mut parts, body) = request.into_parts();
    let body = Inbound::new(body, &parts.headers, peer.body_drain.as_ref());
    let dialect = ErrorFormat::of(&parts);
    let client = identify_client(&view.compiled, peer, &parts);
    let mut record = RequestRecord::new(worker, &view, client.address, &parts, now);
    let visitor = RequestContext { peer, client, body_bytes: body.size_hint().lower(), now };
    let (mut onward, permit, question) = match decide(worker, &view, &visitor, &mut parts, doubts, &mut record) {
        Ok(RequestOutcome::Forward { plan: onward, admission: permit, pending: question }) => {
            (onward, permit, question)
        }
        Ok(RequestOutcome::Respond(reply)) => {
            return ResponseFuture::Done(Some(finish(dialect.refusal(reply).map(Content::from), record)));
        }
        Err(fault) => return ResponseFuture::Done(Some(error_response(&fault, dialect, record))),
    };
    // Each by itself, so that the future below has room for each only once.
    let Admission { fields: mut stamp, delay: mut turn, pending_cost: mut settlement } = permit;
    let bounds = || body_limits::upload_limits(worker, &view.compiled, onward.route);
    let upload = if onward.websocket.is_some() { Upload::Upgrade } else { Upload::new(body, bounds) };
    let (peer, worker) = (Rc::clone(peer), Rc::clone(worker));
    let request = Box::new(Request::from_parts(parts, upload));
    // What is seldom waited for has a future by itself: each request's would have room for it.
    ResponseFuture::Forward(Box::pin(async move {
        if let Some(question) = question {
            match Box::pin(question.resolve(&worker, &view, &peer, &mut record)).await {
                Ok(permit) => Admission { fields: stamp, delay: turn, pending_cost: settlement } = permit,
                Err(denial) => return reject(denial, dialect, record),
            }
        }
        if let Some(turn) = turn.take() {
            stamp = match Box::pin(turn.wait(&mut record, &mut settlement)).await {
                Ok(stamp) => stamp,
                Err(denial) => return reject(denial, dialect, record),
            };
        }
        let mut answer = match forward(&view, &peer, &mut onward, request, &mut record).await {
            Ok(answer) => {
                if let Some(settlement) = settlement {
                    stamp = settlement.settle(&worker, &view, answer.headers()).unwrap_or(stamp);
                }
                if let Some(opening) = onward.websocket.take() {
                    return ResponseFuture::Forward(Box::pin(async move {
                        let mut answer = finish_handshake(answer, opening, dialect, record, &peer, &view).await;
                        stamp.put(answer.headers_mut());
                        ResponseFuture::Done(Some(answer))
                    }));
                }
                finish(answer, record)
            }
            Err(fault) => error_response(&fault, dialect, record),
        };
        // A request that was admitted has consumed, whatever became of it.
        stamp.put(answer.headers_mut());
        ResponseFuture::Done(Some(answer))
    }))
}

#[cold]
fn reject(denial: Rejection, dialect: ErrorFormat, record: RequestRecord) -> ResponseFuture {
    ResponseFuture::Done(Some(match denial {
        Rejection::Refused(reply) => finish(dialect.refusal(reply).map(Content::from), record),
        Rejection::Error(fault) => error_response(&fault, dialect, record),
    }))
}

fn error_response(fault: &RequestError, dialect: ErrorFormat, mut record: RequestRecord) -> Response<ResponseBody> {
    record.record_error(fault);
    finish(dialect.fault(fault).map(Content::from), record)
}

fn finish(answer: Response<Content>, mut record: RequestRecord) -> Response<ResponseBody> {
    record.set_status(answer.status().as_u16());
    answer.map(|content| ResponseBody::new(content, record))
}

/// Who asks: whoever opened the connection or, if that is a proxy that is trusted, whom it names.
fn identify_client(snapshot: &CompiledConfig, peer: &Peer, parts: &Parts) -> Client {
    let ConnectionInfo { address, is_secure, .. } = *peer.connection;
    match &snapshot.trusted_proxies {
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
    record: &mut RequestRecord,
) -> Result<RequestOutcome, RequestError> {
    let (snapshot, now) = (&*view.compiled, visitor.now);
    if parts.version != Version::HTTP_11 {
        request_validation::translate(parts)?;
    }
    let clear = request_validation::check(parts)?;
    if let Some(fault) = doubts(clear.marks) {
        return Err(fault);
    }
    let path = match parts.uri.path() {
        "*" => return Ok(RequestOutcome::Respond(responses::options())),
        path => path_normalize::normalize(path, snapshot.config.path_reading)?,
    };
    let mut scratch = view.scratch();
    let Scratch { context, params, text, refusal_cache: last } = &mut *scratch;
    let lane_index = find_route(snapshot, visitor, parts, &clear, &path, params, record)?;
    let lane = &snapshot.routes[lane_index];
    let slate = snapshot.rules_of(lane);
    let caller = Caller {
        address: visitor.client.address,
        client_cert: visitor.peer.connection.client_cert.as_deref(),
        host: &clear.host,
        method: &parts.method,
        path: &path,
        params,
        uri: &parts.uri,
        headers: &parts.headers,
        route: snapshot.route_name(lane_index),
        tokens: &view.token_cache,
        wall_ms: snapshot.config.jwt.as_ref().map_or(0, |_| worker.clock.wall_ms()),
        clients: snapshot.clients.as_ref(),
        plan: OnceCell::new(),
    };
    let fault = match find_keys(view, lane_index, &caller, context) {
        // No rule has a key to charge.
        Some(fault) if context.inputs.keyed_requests.iter().all(Option::is_none) => return Err(fault),
        fault => fault.map(Box::new),
    };
    let action = snapshot.actions_of(lane).filter(|_| fault.is_none());
    let deed = action.map(|action| action.of(&Seen::of(&caller, visitor.client.is_secure))).transpose()?;
    let (permit, question) =
        match admission::evaluate(worker, snapshot, lane.rules_index as usize, &caller, context, now.unix_ms)? {
            Evaluation::Pending(question) => (Admission::default(), Some(question)),
            Evaluation::Decided(judgement) => {
                worker.metrics.decision_took(worker.clock.instant().duration_since(now.instant));
                record.record_decision(lane.rules_index as usize, context, &judgement);
                if let Decision::Refused = judgement {
                    let again = RepeatRefusal::new(
                        view,
                        visitor.peer,
                        lane_index,
                        context,
                        parts,
                        clear.marks,
                        visitor.body_bytes,
                    );
                    visitor.peer.repeat_refusal.replace(again);
                    let headers = std::mem::take(&mut parts.headers);
                    let slate = lane.rules_index as usize;
                    let work_out =
                        || view.refusal(slate, context, context.result.decided_ms, worker.date(), text, headers);
                    return Ok(RequestOutcome::Respond(last.refusal(
                        slate,
                        context.result.decided_ms,
                        context,
                        work_out,
                    )));
                }
                let policy = view.policy_fields[lane.rules_index as usize].as_ref();
                let stamp = slate.rate_limit_template.render(context, policy, context.result.decided_ms, text);
                let texts = || snapshot.store_keys(slate, &caller);
                (
                    Admission::new(
                        judgement,
                        stamp,
                        worker,
                        view,
                        visitor.peer,
                        lane.rules_index as usize,
                        context,
                        texts,
                    ),
                    None,
                )
            }
        };
    let onward = ForwardPlan { route: lane_index, websocket: None, server_key: None, actions: deed, error: fault };
    if onward.error.is_some() {
        return Ok(RequestOutcome::Forward { plan: onward, admission: permit, pending: question });
    }
    let affinity = snapshot.hash_keys.get(lane.upstream_index as usize).and_then(Option::as_ref);
    let server_key = affinity.and_then(|affinity| affinity.of(&caller));
    let (marks, websocket) = (clear.marks, clear.websocket);
    let normalized = (snapshot.config.forward_path == ForwardPath::Normalized).then(|| path.into_owned());
    let onward = ForwardPlan { server_key, ..onward };
    let onward = onward.prepare(view, parts, visitor, marks, websocket, normalized)?;
    Ok(RequestOutcome::Forward { plan: onward, admission: permit, pending: question })
}

/// Finds the route of a request, which must take what is asked and what comes with it.
fn find_route(
    snapshot: &CompiledConfig,
    visitor: &RequestContext<'_>,
    parts: &Parts,
    clear: &Clear<'_>,
    path: &str,
    params: &mut Vec<Range<usize>>,
    record: &mut RequestRecord,
) -> Result<usize, RequestError> {
    let (host, secure) = (&*clear.host, visitor.client.is_secure);
    let asked = router::Asked { host, method: &parts.method, headers: &parts.headers, path, secure };
    let found = snapshot.router.find(&asked, params);
    let lane =
        found.map_err(|Ambiguous(field)| RequestError::RouteField(field.clone()))?.ok_or(RequestError::NoRoute)?;
    record.set_route(lane);
    if clear.websocket == Some(UpgradeMethod::Connect) && !snapshot.config.routes[lane].websocket {
        return Err(RequestError::NO_WEBSOCKET);
    }
    body_limits::check_size(snapshot, snapshot.actions_of(&snapshot.routes[lane]), visitor.body_bytes)?;
    Ok(lane)
}

impl ForwardPlan {
    /// Makes the head ready for the upstream; `path` is the one that goes there, if it is neither the client's nor one that
    /// the route has made.
    fn prepare(
        mut self,
        view: &WorkerConfig,
        parts: &mut Parts,
        visitor: &RequestContext<'_>,
        marks: SpecialFields,
        websocket: Option<UpgradeMethod>,
        path: Option<String>,
    ) -> Result<ForwardPlan, RequestError> {
        let snapshot = &*view.compiled;
        let upstream = snapshot.routes[self.route].upstream_index as usize;
        let takes_upgrades = || view.targets.get(upstream).is_some_and(Target::supports_upgrade);
        self.websocket = WebSocketHandshake::new(websocket, &parts.headers, || {
            snapshot.config.routes[self.route].websocket && takes_upgrades()
        })?;
        let peer = &visitor.peer.connection.address_field;
        headers::forward_request(&mut parts.headers, marks, peer, &visitor.client, &snapshot.key_fields);
        let path = self.actions.as_mut().and_then(|deed| deed.path.take()).or(path);
        if let Some(deed) = &mut self.actions {
            deed.to_request(&mut parts.headers);
        }
        if path.is_some() || parts.uri.authority().is_some() {
            parts.uri = origin_form(&parts.uri, path)?;
        }
        if let Some(opening) = &self.websocket {
            opening.write_request(&mut parts.headers);
        }
        Ok(self)
    }
}

/// Finds the keys that the rules of a route count a request by. Returns what is wrong with the request if some rule could not
/// be applied; the others are to be charged for it all the same.
fn find_keys(
    view: &WorkerConfig,
    lane: usize,
    caller: &Caller<'_>,
    context: &mut DecisionContext,
) -> Option<RequestError> {
    let snapshot = &*view.compiled;
    let slate = snapshot.rules_of(&snapshot.routes[lane]);
    let mut first_fault = None;
    context.inputs.keyed_requests.clear();
    for (position, identity) in slate.rule_keys.iter().enumerate() {
        context.inputs.keyed_requests.push(match identity.of(caller) {
            Ok(keyed_request) => keyed_request,
            // A rule that is only tried out refuses nobody, for whatever reason.
            Err(_) if snapshot.rule_set.is_shadow(&slate.charge_plan, position) => {
                view.route_metrics[lane].shadowed(position);
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
    record: &mut RequestRecord,
) -> Result<Response<Content>, RequestError> {
    if let Some(fault) = onward.error.take() {
        return Err(*fault);
    }
    let snapshot = &*view.compiled;
    let lane = &snapshot.routes[onward.route];
    let action = snapshot.actions_of(lane);
    let timeouts = action.and_then(|action| action.timeouts.as_ref()).unwrap_or(&snapshot.config.timeouts);
    peer.body_timeout.set(timeouts.body);
    if let Some(reply) = onward.actions.as_mut().and_then(|deed| deed.reply.take()) {
        return Ok(apply_response_actions(reply.map(Content::from), onward.actions.take()));
    }
    let upstream = lane.upstream_index as usize;
    record.set_upstream(&snapshot.config.upstreams[upstream].name);
    let answer = match &view.targets[upstream] {
        Target::Echo => Box::pin(echo::answer(*request, timeouts.body, &peer.timer)).await?.map(Content::from),
        Target::Servers(servers) => {
            // HTTP/1.0 knows no informational answers.
            let interim = (request.version() >= Version::HTTP_11).then(|| Rc::clone(&peer.informational));
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
    Ok(apply_response_actions(answer, onward.actions.take()))
}

/// An answer with the changes that its route makes.
fn apply_response_actions(mut answer: Response<Content>, deed: Option<Box<AppliedActions>>) -> Response<Content> {
    if let Some(deed) = deed {
        deed.to_response(answer.headers_mut());
    }
    answer
}
