//! Handles one request: validates it, finds its route and keys, lets the rules decide, and forwards it.
//!
//! `handle` responds at once where it need not wait (refusals, errors); otherwise it returns a future.

use std::net::IpAddr;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::request::Parts;
use http::uri::{PathAndQuery, Uri};
use http::{Request, Response, Version};
use http_body::Body as _;

use super::admission::{Admission, Evaluation, PendingAdmission, evaluate};
use super::body_reading::{BodyReading, ReadBody};
use super::include_usage::{hide_usage, sets_include_usage};
use super::peer::{ConnectionInfo, Peer};
use super::request_record::RequestRecord;
use super::response::{
    Content, ResponseBody, ResponseFormat, error_response, forwarded_response, refusal_response,
    written_refusal_response,
};
use super::response_cost::PendingCost;
use super::websocket::{TunnelSession, WebSocketHandshake};
use super::worker_config::{DecisionBuffers, Target, WorkerConfig};
use super::worker_state::{DecidedBy, WorkerState};
use crate::proxy::served_config::ServedConfig;
use crate::upstream::echo;
use crate::upstream::forward::ForwardError;
use crate::upstream::load_balancer::RequestTraits;
use crate::upstream::request_body::{BodySource, ClientBody, MinUploadRate, RequestBody, UploadLimits};
use transom_config::RouteId;
use transom_config::limits::Timeouts;
use transom_config::path::ForwardPath;
use transom_http::error::RequestError;
use transom_http::forwarded::ClientInfo;
use transom_http::headers::{ConfiguredFields, SpecialFields};
use transom_http::request_validation::{Schemes, ValidatedRequest};
use transom_http::websocket_handshake::UpgradeMethod;
use transom_http::{forward_auth, headers, path_normalize, request_validation};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::rule_set::NotCounted;
use transom_rules::access::AccessControl;
use transom_rules::ratelimit_headers::RateLimitFields;
use transom_rules::resolved_request::{RequestView, ResolvedRequest};
use transom_rules::responses::{self, LocalResponse, RefusedRequest, WrittenRefusal};
use transom_rules::route_actions::{AppliedActions, RouteActions};
use transom_runtime::clock::Timestamp;
use transom_usage::request_body::{BodyPlan, BodyValues};

/// A request in progress. A panic while it is handled becomes a 500 response; the worker goes on.
pub enum ResponseFuture {
    /// The response. `None` once it was taken, and after a panic.
    Done(Option<Response<ResponseBody>>),
    /// The request waits: for a slot, the shared store, a later window, or its upstream. The output is `Done`, or the next
    /// step to wait for.
    Waiting(Pin<Box<dyn Future<Output = ResponseFuture>>>),
}

impl ResponseFuture {
    /// Starts to handle a request. Inlined, because it is called once for each.
    #[inline(always)]
    pub fn start(handle: impl FnOnce() -> ResponseFuture) -> ResponseFuture {
        let started = catch_unwind(AssertUnwindSafe(handle));
        started.unwrap_or_else(|_panic| ResponseFuture::Done(Some(panic_response())))
    }

    /// The response, if there is nothing to wait for.
    pub fn take_ready(&mut self) -> Option<Response<ResponseBody>> {
        match self {
            ResponseFuture::Done(response) => Some(response.take().unwrap_or_else(panic_response)),
            ResponseFuture::Waiting(_) => None,
        }
    }

    pub fn poll_response(&mut self, cx: &mut Context<'_>) -> Poll<Response<ResponseBody>> {
        loop {
            *self = match self {
                ResponseFuture::Done(response) => {
                    return Poll::Ready(response.take().unwrap_or_else(panic_response));
                }
                ResponseFuture::Waiting(next) => match catch_unwind(AssertUnwindSafe(|| next.as_mut().poll(cx))) {
                    Ok(Poll::Ready(next)) => next,
                    Ok(Poll::Pending) => return Poll::Pending,
                    Err(_panic) => ResponseFuture::Done(None),
                },
            };
        }
    }
}

/// The panic hook has logged the panic.
fn panic_response() -> Response<ResponseBody> {
    responses::error_response(&RequestError::Panic).map(|body| ResponseBody::unrecorded(Content::from(body)))
}

/// What `decide` found.
enum RequestOutcome {
    /// With `pending`, the request waits for a slot or the shared store first, and `admission` is empty.
    Forward { plan: ForwardPlan, admission: Admission, pending: Option<Box<PendingAdmission>> },
    /// A refusal, or another response that needs no upstream.
    Respond(LocalResponse),
    /// A refusal on an HTTP/1.1 connection.
    RespondWritten(WrittenRefusal),
    /// The body has to be read first, since rules depend on it.
    ReadBody(Box<BodyReading>),
}

/// Where a request goes, and how the route changes it.
struct ForwardPlan {
    route: RouteId,
    websocket: Option<Box<WebSocketHandshake>>,
    /// The address of the client, for servers that get PROXY headers.
    client: Option<IpAddr>,
    /// Hash that selects the server, for upstreams with hash load balancing.
    server_key: Option<NonZeroU64>,
    actions: Option<Box<AppliedActions>>,
    /// Answers the request instead of the upstream: the body, or the key of one rule, could not be read. Other rules were charged.
    error: Option<Box<RequestError>>,
}

/// What the rules of a request have decided.
enum RulesOutcome {
    Decided {
        evaluation: Evaluation,
        actions: Option<Box<AppliedActions>>,
        /// See [`ForwardPlan::error`].
        error: Option<Box<RequestError>>,
    },
    ReadBody(Box<BodyReading>),
}

/// What rules can know of the body when they decide.
enum BodyState {
    /// All that they depend on.
    Known,
    Unread(Box<BodyReading>),
    /// The body cannot be read. Only rules that do not depend on it decide.
    Failed(Box<RequestError>),
}

/// What is known about a request besides its head.
struct RequestContext<'a> {
    worker: &'a Rc<WorkerState>,
    config: &'a Rc<WorkerConfig>,
    peer: &'a Peer,
    client: &'a ClientInfo,
    /// Lower bound, from the head.
    body_bytes: u64,
    body: &'a ClientBody,
    read_values: Option<&'a ReadValues>,
    now: Timestamp,
}

impl RequestContext<'_> {
    fn schemes(&self) -> Schemes {
        Schemes { is_connection_secure: self.peer.connection.is_secure, is_client_secure: self.client.is_secure }
    }
}

/// What was read of a body, or why it could not be read.
type ReadValues = Result<Box<BodyValues>, Box<RequestError>>;

/// A request whose head has arrived.
struct ReceivedRequest {
    config: Rc<WorkerConfig>,
    parts: Parts,
    body: ClientBody,
    /// `None` before the body was read.
    read_values: Option<ReadValues>,
    /// The usage of the stream is to be hidden.
    hides_usage: bool,
    client: ClientInfo,
    format: ResponseFormat,
    record: RequestRecord,
}

/// Handles a request up to the head of its response. `head_error`: an error of the head that its fields do not show.
pub fn handle(
    worker: &Rc<WorkerState>,
    peer: &Rc<Peer>,
    mut parts: Parts,
    body: BodySource,
    head_error: Option<RequestError>,
) -> ResponseFuture {
    let now = worker.clock.now();
    let config = worker.config();
    peer.body_timeout.set(config.served.config.timeouts.body);
    let body = ClientBody::new(body, &parts.headers, peer.body_drain.as_ref());
    let ConnectionInfo { address, is_secure, is_forward_auth, .. } = *peer.connection;
    let format = ResponseFormat::of(&parts);
    let (client, restored) = match is_forward_auth {
        false => (config.served.identify_client(address, is_secure, &parts.headers), Ok(())),
        true => {
            let client = config.served.identify_client_of_proxy(address, &parts.headers);
            (client, forward_auth::restore_request(&mut parts, client.hops))
        }
    };
    let record = RequestRecord::new(worker, &config, &client, &parts, now);
    if let Err(error) = restored {
        return ResponseFuture::Done(Some(error_response(&error, format, record)));
    }
    let received =
        ReceivedRequest { config, parts, body, read_values: None, hides_usage: false, client, format, record };
    respond(worker, peer, received, now, head_error)
}

/// Decides a request, and forwards it. Not inlined, so that `decide` has one caller and is.
#[inline(never)]
fn respond(
    worker: &Rc<WorkerState>,
    peer: &Rc<Peer>,
    mut received: ReceivedRequest,
    now: Timestamp,
    head_error: Option<RequestError>,
) -> ResponseFuture {
    let is_forward_auth = peer.connection.is_forward_auth;
    // On `forward_auth`, the proxy sends the head of the original request without its body.
    let body_bytes = if is_forward_auth { 0 } else { received.body.size_hint().lower() };
    let ReceivedRequest { config, parts, body, read_values, client, format, record, .. } = &mut received;
    let read_values = read_values.as_ref();
    let request_context = RequestContext { worker, config, peer, client, body_bytes, body, read_values, now };
    let (mut plan, admission, pending) = match decide(&request_context, parts, head_error, format, record) {
        Ok(RequestOutcome::Forward { plan, admission, pending }) => (plan, admission, pending),
        Ok(RequestOutcome::Respond(reply)) => {
            return ResponseFuture::Done(Some(refusal_response(reply, received.format, received.record)));
        }
        Ok(RequestOutcome::RespondWritten(refusal)) => {
            return ResponseFuture::Done(Some(written_refusal_response(refusal, received.record)));
        }
        Ok(RequestOutcome::ReadBody(reading)) => return read_body(worker, peer, received, *reading),
        Err(error) => {
            received.record.release_all_slots();
            return ResponseFuture::Done(Some(error_response(&error, received.format, received.record)));
        }
    };
    let ReceivedRequest { config, mut parts, body, read_values, hides_usage, format, mut record, .. } = received;
    let body_values = read_values.and_then(Result::ok);
    // Taken apart here, so that the future below stores each value only once.
    let Admission { mut fields, mut delay, mut pending_cost } = admission;
    let upload = match plan.websocket {
        Some(_) => RequestBody::Upgrade,
        None => RequestBody::new(body, || upload_limits(worker, &config.served, plan.route)),
    };
    if record.is_logged() {
        record.set_upload(upload.progress());
    }
    record.identify(&mut parts.headers);
    let (peer, worker) = (Rc::clone(peer), Rc::clone(worker));
    let mut request = Box::new(Request::from_parts(parts, upload));
    // Rare waits are boxed, so that the future of every other request does not reserve memory for them.
    ResponseFuture::Waiting(Box::pin(async move {
        if let Some(pending) = pending {
            match Box::pin(pending.resolve(&worker, &config, &mut record)).await {
                Ok(admission) => Admission { fields, delay, pending_cost } = admission,
                Err(rejection) => return ResponseFuture::Done(Some(rejection.into_response(format, record))),
            }
        }
        if let Some(delay) = delay.take() {
            record.delay_began();
            let waited = Box::pin(delay.wait(&mut record, &mut pending_cost)).await;
            record.delay_ended();
            fields = match waited {
                Ok(fields) => fields,
                Err(rejection) => return ResponseFuture::Done(Some(rejection.into_response(format, record))),
            };
        }
        // The response to an authorization request says nothing about the response to the client.
        // Dropped before the record, as when the client goes away, so that the access log states what bytes have cost.
        let mut pending_cost = pending_cost.filter(|_| !is_forward_auth);
        if let Some(pending_cost) = &mut pending_cost {
            pending_cost.note_record(&mut record);
            pending_cost.begin_forwarding(plan.route, &mut request, body_values);
        }
        let response = match forward(&config, &peer, &mut plan, request, &mut record).await {
            Ok(mut response) => {
                if let Some(handshake) = plan.websocket.take() {
                    return ResponseFuture::Waiting(Box::pin(async move {
                        let response = match handshake.finish(response).await {
                            Ok((response, None)) => forwarded_response(response, format, record),
                            Ok((response, Some(tunnel))) => {
                                let meter = pending_cost.as_mut().and_then(|pending_cost| pending_cost.tunnel_opened());
                                let (session, response) = TunnelSession::open(tunnel, response, format, record, meter);
                                peer.tunnel.replace(Some(session));
                                response
                            }
                            Err(error) => failed_response(&error.into(), format, record, &mut pending_cost),
                        };
                        ResponseFuture::Done(Some(settle(response, fields, pending_cost)))
                    }));
                }
                if hides_usage {
                    hide_usage(&mut response);
                }
                forwarded_response(response, format, record)
            }
            Err(error) => failed_response(&error, format, record, &mut pending_cost),
        };
        ResponseFuture::Done(Some(settle(response, fields, pending_cost)))
    }))
}

/// Reads the body of a request, and then decides.
#[inline(never)]
fn read_body(
    worker: &Rc<WorkerState>,
    peer: &Rc<Peer>,
    mut received: ReceivedRequest,
    reading: BodyReading,
) -> ResponseFuture {
    let (worker, peer) = (Rc::clone(worker), Rc::clone(peer));
    ResponseFuture::Waiting(Box::pin(async move {
        let headers = &mut received.parts.headers;
        (received.body, received.read_values) = match reading.read(received.body, headers, &peer.timer).await {
            Ok(ReadBody { body, values, hides_usage }) => {
                received.hides_usage = hides_usage;
                (body, Some(Ok(values)))
            }
            Err(error) => (ClientBody::new(BodySource::Empty, headers, None), Some(Err(Box::new(error)))),
        };
        respond(&worker, &peer, received, worker.clock.now(), None)
    }))
}

/// The response to a request that could not be forwarded.
fn failed_response(
    error: &ForwardError,
    format: ResponseFormat,
    record: RequestRecord,
    pending_cost: &mut Option<Box<PendingCost>>,
) -> Response<ResponseBody> {
    // No response proves that the upstream did not act on what it has received.
    *pending_cost = pending_cost.take().filter(|_| !(error.may_be_sent && error.error.is_of_request_body()));
    pending_cost.iter_mut().for_each(|pending_cost| pending_cost.forwarding_failed(error));
    error_response(&error.error, format, record)
}

/// Settles what the response decides, and adds the RateLimit fields. Errors carry them too: an admitted request has consumed
/// its tokens.
fn settle(
    mut response: Response<ResponseBody>,
    fields: RateLimitFields,
    pending_cost: Option<Box<PendingCost>>,
) -> Response<ResponseBody> {
    let fields = pending_cost.and_then(|pending_cost| pending_cost.settle(&mut response)).unwrap_or(fields);
    fields.add_to(response.headers_mut());
    response
}

/// Validates the request, finds its route and keys, and charges its rules. Never waits.
fn decide(
    request_context: &RequestContext<'_>,
    parts: &mut Parts,
    head_error: Option<RequestError>,
    format: &mut ResponseFormat,
    record: &mut RequestRecord,
) -> Result<RequestOutcome, RequestError> {
    let RequestContext { worker, config, now, .. } = *request_context;
    let served = &*config.served;
    if parts.version != Version::HTTP_11 {
        request_validation::translate(parts)?;
    }
    let validated = request_validation::validate(parts, request_context.schemes())?;
    if let Some(error) = head_error {
        return Err(error);
    }
    let path = match parts.uri.path() {
        "*" => return Ok(RequestOutcome::Respond(responses::options_response())),
        path => path_normalize::normalize(path, served.config.path_reading)?,
    };
    let mut scratch = config.scratch();
    let DecisionBuffers { context, params, text, refusal_cache } = &mut *scratch;
    let view = RequestView {
        address: request_context.client.address,
        connection: request_context.peer.connection.key_values(),
        is_secure: request_context.client.is_secure,
        host: &validated.host,
        method: &parts.method,
        path: &path,
        uri: &parts.uri,
        headers: &parts.headers,
        body: request_context.read_values.and_then(|read| read.as_deref().ok()),
    };
    let clients = config.clients();
    let wall_ms = || worker.clock.wall_ms();
    let resolved = served.resolve(view, clients.as_deref(), params, &config.token_cache, wall_ms)?;
    let (route_id, rules_id, rules) = (resolved.route_id, resolved.route.rules, resolved.rules);
    record.set_route(route_id);
    let (actions, variables) = (resolved.actions(), resolved.variables());
    format.changes = actions.and_then(|actions| actions.response_changes(&variables));
    if (config.reports_clients() || record.is_logged())
        && let Some(client) = resolved.clients.reported_client(&resolved.attributes)
    {
        record.set_client(client);
    }
    if let Some(access) = &served.access {
        check_access(access, &resolved, now, record)?;
    }
    resolved.check(&validated, request_context.body_bytes)?;
    let (evaluation, actions, error) = match decide_by_rules(request_context, &resolved, &validated, context, record)? {
        RulesOutcome::Decided { evaluation, actions, error } => (evaluation, actions, error),
        RulesOutcome::ReadBody(reading) => return Ok(RequestOutcome::ReadBody(reading)),
    };
    let (admission, pending) = match evaluation {
        Evaluation::Pending(pending) => (Admission::default(), Some(pending)),
        Evaluation::Decided(decision) => {
            let verdicts = served.route_rules[rules_id].charge_plan.verdicts(context, &decision);
            let decided_ms = verdicts.decided_ms();
            if let Decision::Refused = decision {
                let (id, headers) = (record.request_id(), std::mem::take(&mut parts.headers));
                let refused = RefusedRequest { now_ms: decided_ms, id: Some(id), headers, text };
                let render = || config.refusal(rules_id, verdicts, worker.date(), refused);
                let refusal = refusal_cache.refusal(rules_id, decided_ms, verdicts, render);
                let written = if format.takes_written() { refusal.written() } else { None };
                return Ok(written.map_or_else(
                    || RequestOutcome::Respond(refusal.response.clone()),
                    RequestOutcome::RespondWritten,
                ));
            }
            let policy = config.policy_fields[rules_id].as_ref();
            let fields = rules.rate_limit_template.render(verdicts, policy, decided_ms, text);
            let store_keys = || resolved.store_keys();
            let by = DecidedBy { worker, config, rules_id, may_hold: resolved.route.may_hold };
            let admission = Admission::new(decision, fields, by, context, store_keys);
            (admission, None)
        }
    };
    let plan = ForwardPlan { route: route_id, websocket: None, client: None, server_key: None, actions, error };
    if plan.error.is_some() || request_context.peer.connection.is_forward_auth {
        return Ok(RequestOutcome::Forward { plan, admission, pending });
    }
    let hash_key = resolved.route.upstream.and_then(|upstream| served.hash_keys[upstream].as_ref());
    let server_key = hash_key.and_then(|hash_key| hash_key.hash(&resolved.attributes));
    let (special_fields, websocket) = (validated.special_fields, validated.websocket);
    let normalized = (served.config.general.forward_path == ForwardPath::Normalized).then(|| path.into_owned());
    let plan = ForwardPlan { client: request_context.client.address.ip(), server_key, ..plan };
    let plan = plan.prepare(parts, request_context, special_fields, websocket, normalized)?;
    Ok(RequestOutcome::Forward { plan, admission, pending })
}

/// Finds the keys of the rules, lets them decide and charge, and counts the decision. Slots of a refused request are released.
#[inline(always)]
fn decide_by_rules(
    request_context: &RequestContext<'_>,
    resolved: &ResolvedRequest<'_>,
    validated: &ValidatedRequest<'_>,
    context: &mut DecisionContext,
    record: &mut RequestRecord,
) -> Result<RulesOutcome, RequestError> {
    let RequestContext { worker, config, now, .. } = *request_context;
    let charge_plan = &resolved.rules.charge_plan;
    let body = match body_state(request_context, resolved, validated) {
        BodyState::Unread(reading) if !is_refused_unread(worker, resolved, context) => {
            return Ok(RulesOutcome::ReadBody(reading));
        }
        // An unread body stays unread: the rules refuse the request whatever it says.
        body => body,
    };
    let error = find_keys(config, resolved, &body, context)?;
    charge_plan.prefetch(&worker.counters.table, &context.inputs.keyed_requests);
    let actions = resolved.actions().filter(|_| error.is_none());
    let actions = actions.map(|actions| actions.evaluate(&resolved.variables())).transpose()?;
    let mut evaluation = evaluate(worker, resolved, context, record, now.unix_ms)?;
    if let BodyState::Unread(reading) = body
        && !matches!(evaluation, Evaluation::Decided(Decision::Refused))
    {
        // A window or a slot has become free since the peek.
        record.release_all_slots();
        worker.counters.refund_decision(charge_plan, context);
        return Ok(RulesOutcome::ReadBody(reading));
    }
    match &mut evaluation {
        Evaluation::Pending(pending) => {
            record.set_keys(resolved);
            pending.key_names = config.names_for_marks(resolved);
            // The decision will be counted without the request, which has the text of its keys.
            config.name_keys(resolved, &context.inputs.keyed_requests);
        }
        Evaluation::Decided(decision) => {
            if record.needs_keys(charge_plan.verdicts(context, decision)) {
                record.set_keys(resolved);
            }
            worker.metrics.decision_took(worker.clock.instant().duration_since(now.instant));
            if let Decision::Refused = decision {
                record.release_slots(context);
            }
            let verdicts = charge_plan.verdicts(context, decision);
            record.record_decision(resolved.route.rules, verdicts);
            config.count_keys(resolved, verdicts);
        }
    }
    Ok(RulesOutcome::Decided { evaluation, actions, error })
}

/// Finds the key of each rule; without the body, only the keys of rules that do not depend on it. Returns the error of the body or of
/// a rule without a key; the others are charged nevertheless.
#[inline(always)]
fn find_keys(
    config: &WorkerConfig,
    resolved: &ResolvedRequest<'_>,
    body: &BodyState,
    context: &mut DecisionContext,
) -> Result<Option<Box<RequestError>>, RequestError> {
    let inputs = &mut context.inputs;
    let error = match body {
        BodyState::Known => resolved.find_keys(inputs, |_position, _found| ()),
        BodyState::Unread(_) => resolved.find_keys_without_body(inputs, |_position, _found| ()),
        BodyState::Failed(error) => {
            let _of_key = resolved.find_keys_without_body(inputs, |_position, _found| ());
            Some((**error).clone())
        }
    };
    // Counted here, because a request without a key under any rule gets no decision.
    let metrics = &config.route_metrics[resolved.route_id];
    for (position, reason) in &inputs.uncounted {
        match reason {
            NotCounted::Exempt => metrics.exempt(*position),
            NotCounted::Failed if resolved.rules.charge_plan.is_shadow(*position) => metrics.shadowed(*position),
            NotCounted::Skipped | NotCounted::UnknownKey | NotCounted::Failed => {}
        }
    }
    match error {
        // No rule has a key to charge.
        Some(error) if inputs.keyed_requests.iter().all(Option::is_none) => Err(error),
        error => Ok(error.map(Box::new)),
    }
}

#[inline(always)]
fn body_state(
    request_context: &RequestContext<'_>,
    resolved: &ResolvedRequest<'_>,
    validated: &ValidatedRequest<'_>,
) -> BodyState {
    let plan = resolved.rules.body_plan.as_ref();
    plan.map_or(BodyState::Known, |plan| state_of_needed_body(request_context, resolved, validated, plan))
}

/// As [`body_state`], where rules depend on what `plan` reads of bodies.
#[cold]
fn state_of_needed_body(
    request_context: &RequestContext<'_>,
    resolved: &ResolvedRequest<'_>,
    validated: &ValidatedRequest<'_>,
    plan: &Arc<BodyPlan>,
) -> BodyState {
    let RequestContext { worker, config, peer, client, body, body_bytes, read_values, .. } = request_context;
    if let Some(Err(error)) = read_values {
        return BodyState::Failed(error.clone());
    }
    let is_known = read_values.is_some()
        || body.is_end_stream()
        || validated.websocket.is_some()
        || peer.connection.is_forward_auth;
    if is_known {
        return BodyState::Known;
    }
    let (served, actions) = (&*config.served, resolved.actions());
    let max_bytes = served.body_key_limit(actions);
    if *body_bytes > max_bytes as u64 {
        return BodyState::Failed(Box::new(RequestError::BodyTooLarge(max_bytes as u64)));
    }
    let timeout = timeouts_of(served, actions).body;
    let limits = upload_limits(worker, served, resolved.route_id);
    let configured = served.config.routes[resolved.route_id].actions.as_deref();
    let set_include_usage = sets_include_usage(configured, resolved.attributes.path);
    BodyState::Unread(Box::new(BodyReading {
        client: client.address,
        plan: Arc::clone(plan),
        max_bytes,
        limits,
        timeout,
        set_include_usage,
    }))
}

/// Whether rules that do not depend on the body refuse the request: then its body costs no memory and time. The error of a rule
/// without a key comes after the refusal, as for other requests.
#[cold]
fn is_refused_unread(worker: &WorkerState, resolved: &ResolvedRequest<'_>, context: &mut DecisionContext) -> bool {
    resolved.rules.may_refuse_unread && {
        let _error = resolved.find_keys_without_body(&mut context.inputs, |_position, _found| ());
        worker.counters.refuses(&resolved.rules.charge_plan, context)
    }
}

fn timeouts_of<'a>(served: &'a ServedConfig, actions: Option<&'a RouteActions>) -> &'a Timeouts {
    actions.and_then(|actions| actions.timeouts.as_ref()).unwrap_or(&served.config.timeouts)
}

/// Fails for a request that a deny entry or the allow list of its route denies.
#[inline(never)]
fn check_access(
    access: &AccessControl,
    resolved: &ResolvedRequest<'_>,
    now: Timestamp,
    record: &mut RequestRecord,
) -> Result<(), RequestError> {
    let config = Rc::clone(record.config());
    let mut deny_list = config.deny_list.borrow_mut();
    if !deny_list.as_ref().is_some_and(|kept| access.is_current(kept)) {
        let current = deny_list.insert(access.current());
        config.denials.keep(|id| current.list().has_entry(id));
    }
    // Every configuration with access control has a list.
    let Some(deny) = deny_list.as_ref() else { return Ok(()) };
    let Some(denial) = resolved.denial(access, deny.list(), now.unix_ms)? else { return Ok(()) };
    record.record_denial(denial);
    Err(RequestError::Denied)
}

/// Limits of size and rate for the body of a request while it is forwarded.
fn upload_limits(worker: &WorkerState, served: &ServedConfig, route: RouteId) -> UploadLimits {
    let limits = &served.config.limits;
    let actions = served.actions_of(&served.routes[route]);
    let rate = actions.and_then(|actions| actions.min_request_rate).unwrap_or(limits.min_request_rate);
    UploadLimits::new(served.max_body_bytes(actions), MinUploadRate::new(&worker.timers, rate, limits.rate_grace))
        .without_trailers(actions.and_then(|actions| actions.replaced_fields.clone()))
}

impl ForwardPlan {
    /// Prepares the head for the upstream. `path` replaces the client's path, unless the route sets one.
    fn prepare(
        mut self,
        parts: &mut Parts,
        request_context: &RequestContext<'_>,
        special_fields: SpecialFields,
        websocket: Option<UpgradeMethod>,
        path: Option<String>,
    ) -> Result<ForwardPlan, RequestError> {
        let config = request_context.config;
        let served = &*config.served;
        let upstream = served.routes[self.route].upstream;
        let supports_upgrade =
            || upstream.is_some_and(|upstream| config.upstreams.targets[upstream].supports_upgrade());
        self.websocket = WebSocketHandshake::new(websocket, &parts.headers, || {
            served.config.routes[self.route].websocket && supports_upgrade()
        })?;
        let peer = &request_context.peer.connection.address_field;
        let configured = ConfiguredFields { client: served.client_field(), keys: &served.key_fields };
        headers::forward_request(&mut parts.headers, special_fields, peer, request_context.client, configured);
        let path = self.actions.as_mut().and_then(|actions| actions.path.take()).or(path);
        if let Some(actions) = &mut self.actions {
            actions.apply_to_request(&mut parts.headers);
        }
        if path.is_some() || parts.uri.authority().is_some() {
            parts.uri = origin_form(&parts.uri, path)?;
        }
        if let Some(handshake) = &self.websocket {
            handshake.write_request(&mut parts.headers);
        }
        Ok(self)
    }
}

/// The target in origin form: path and query only, so that it cannot name another host (RFC 9112, 3.2.1).
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

/// Forwards a request, or responds as the route says.
async fn forward(
    config: &WorkerConfig,
    peer: &Peer,
    plan: &mut ForwardPlan,
    mut request: Box<Request<RequestBody>>,
    record: &mut RequestRecord,
) -> Result<Response<Content>, ForwardError> {
    if let Some(error) = plan.error.take() {
        return Err(ForwardError { error: *error, may_be_sent: false, was_held: false });
    }
    if peer.connection.is_forward_auth {
        let reply = plan.actions.as_mut().and_then(|actions| actions.direct_response.take());
        // A refusal or redirect of the route is passed on by the proxy; after any other response it forwards the request.
        let reply = reply.filter(|reply| !reply.status().is_success()).unwrap_or_else(responses::authorized_response);
        return Ok(reply.map(Content::from));
    }
    let served = &*config.served;
    let route = &served.routes[plan.route];
    let actions = served.actions_of(route);
    let timeouts = timeouts_of(served, actions);
    peer.body_timeout.set(timeouts.body);
    if let Some(reply) = plan.actions.as_mut().and_then(|actions| actions.direct_response.take()) {
        return Ok(reply.map(Content::from));
    }
    // A route without an upstream has a response.
    let upstream = route.upstream.ok_or(RequestError::NoRoute)?;
    let attempt_log = record.forwarding_began(upstream);
    match &config.upstreams.targets[upstream] {
        Target::Echo => Ok(Box::pin(echo::respond(*request, timeouts.body, &peer.timer)).await?.map(Content::from)),
        Target::Servers(servers) => {
            // HTTP/1.0 has no 1xx responses (RFC 9110, 15.2).
            let informational = (request.version() >= Version::HTTP_11).then(|| Rc::clone(&peer.informational));
            // Only HTTP/1.0 requests may lack Host.
            if informational.is_none() {
                servers.add_host(&mut request);
            }
            *request.version_mut() = Version::HTTP_11;
            let traits = RequestTraits::of(&request, plan.server_key, plan.client);
            let response = servers.forward(request, traits, timeouts, &peer.timer, informational, attempt_log).await;
            record.forwarding_ended();
            let mut response = response?;
            *response.version_mut() = Version::HTTP_11;
            let location = plan.actions.as_mut().and_then(|actions| actions.public_location.take());
            if let Some((location, inverse)) = location.zip(actions.and_then(|actions| actions.path_inverse.as_ref())) {
                location.replace(inverse, response.headers_mut(), |authority| servers.has_server(authority));
            }
            Ok(response.map(Content::from))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::net::{IpAddr, Ipv4Addr};
    use std::task::Waker;

    use super::*;
    use transom_runtime::clock::Clock;

    use crate::proxy::held_slots::HeldSlots;
    use crate::proxy::worker_config::RecordOutputs;
    use crate::upstream::server_health::{ListedServers, build_upstream_health};
    use transom_limiter::concurrency::ConcurrencyTable;
    use transom_limiter::handles::{Handle, PlanPosition};
    use transom_limiter::key::{KeyHash, Seed};
    use transom_limiter::rule_set::RuleSet;
    use transom_limiter::table::Table;
    use transom_rules::compiled_config::LiveData;
    use transom_runtime::metrics::events::{ConcurrencyGauge, NAMES};
    use transom_runtime::metrics::exposition::{Format, render};
    use transom_runtime::metrics::{Registry, WorkerId};
    use transom_store::shared_counters::SharedByWorkers;

    const KEY: KeyHash = KeyHash { bucket_hash: 1, tag: 1 };

    fn panics<T>() -> T {
        panic!("a panic for this test")
    }

    /// A key of which one request may be in flight.
    struct Rule {
        registry: Registry,
        gauge: ConcurrencyGauge,
        table: Arc<ConcurrencyTable>,
    }

    impl Rule {
        fn new() -> Rule {
            let registry = Registry::default();
            let gauge = ConcurrencyGauge::new(&registry, WorkerId::at(0), "r");
            Rule { registry, gauge, table: Arc::new(ConcurrencyTable::with_capacity(1, 4)) }
        }

        /// The only slot, as a request holds it.
        fn hold_slot(&self) -> HeldSlots {
            let mut slots = HeldSlots::default();
            slots.add(PlanPosition::at(0), self.table.try_acquire(KEY, 1).0.unwrap(), self.gauge.clone());
            self.assert_in_flight(1);
            slots
        }

        #[track_caller]
        fn assert_in_flight(&self, requests: u64) {
            assert_eq!(self.table.in_use(KEY), requests);
            let metrics = render(&self.registry, NAMES, &[], Format::Prometheus);
            assert!(metrics.contains(&format!("transom_concurrent_requests{{rule=\"r\"}} {requests}\n")), "{metrics}");
        }
    }

    /// A request that panics when it is polled once more than `waits` times.
    fn panicking_request(slots: HeldSlots, waits: usize) -> ResponseFuture {
        let mut polls = 0;
        ResponseFuture::Waiting(Box::pin(async move {
            let _slots = slots;
            poll_fn(|_| {
                polls += 1;
                if polls > waits { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            panics()
        }))
    }

    #[test]
    fn a_panic_while_a_request_is_handled_releases_its_slots() {
        let rule = Rule::new();
        let decided = |rule: &Rule| {
            let slots = rule.hold_slot();
            panics::<()>();
            panicking_request(slots, 0)
        };
        let in_next_step = |slots| {
            ResponseFuture::Waiting(Box::pin(async move {
                std::future::ready(()).await;
                panicking_request(slots, 1)
            }))
        };
        let requests: [(&dyn Fn() -> ResponseFuture, usize); 4] = [
            (&|| decided(&rule), 0),
            (&|| panicking_request(rule.hold_slot(), 0), 0),
            (&|| panicking_request(rule.hold_slot(), 3), 3),
            (&|| in_next_step(rule.hold_slot()), 1),
        ];
        let mut cx = Context::from_waker(Waker::noop());
        for (start, waits) in requests {
            let mut request = ResponseFuture::start(start);
            for _ in 0..waits {
                assert!(request.poll_response(&mut cx).is_pending());
                rule.assert_in_flight(1);
            }
            let Poll::Ready(response) = request.poll_response(&mut cx) else { panic!("no response after a panic") };
            assert_eq!(response.status().as_u16(), 500);
            // The connection still holds the response, and may hold the future.
            rule.assert_in_flight(0);
        }
    }

    /// The response to the panic is made without the record of the request, which the panic drops.
    #[test]
    fn a_panic_is_counted_as_the_response_that_it_causes() {
        let text = "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/\"\nupstream = \"u\"\n";
        let (config, clock) = (transom_config::read(text).unwrap(), Clock::manual(1_700_000_000_000));
        let registry = Arc::new(Registry::default());
        let upstream_health =
            build_upstream_health(&config, |_| ListedServers::default(), &[], &registry, 1, clock.instant());
        let rule_set = RuleSet::new(config.limiter_rules(), Seed(1, 2), None);
        let served = ServedConfig::new(config, Seed(1, 2), rule_set, upstream_health, LiveData::default());
        let shared = SharedByWorkers::new(Arc::new(Table::with_capacity(64).unwrap()), clock);
        let worker = WorkerState::new(WorkerId::at(0), shared, Arc::clone(&registry), served, RecordOutputs::default());
        let worker = Rc::new(worker);
        let (parts, ()) = Request::new(()).into_parts();
        let client =
            worker.config().served.identify_client(IpAddr::from(Ipv4Addr::LOCALHOST).into(), false, &parts.headers);
        let record = RequestRecord::new(&worker, &worker.config(), &client, &parts, worker.clock.now());
        let mut request = ResponseFuture::start(|| {
            let _record = record;
            panics()
        });
        assert_eq!(request.take_ready().unwrap().status().as_u16(), 500);
        let metrics = render(&registry, NAMES, &[], Format::Prometheus);
        for series in [
            "transom_requests_total{route=\"\",code=\"500\"} 1\n",
            "transom_request_errors_total{error=\"panic\"} 1\n",
            "transom_requests_active 0\n",
        ] {
            assert!(metrics.contains(series), "{metrics}");
        }
    }

    /// The task of a connection owns the response while its body is sent.
    #[test]
    fn a_panic_of_a_whole_task_releases_the_slots() {
        let rule = Rule::new();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let slots = rule.hold_slot();
        let task = runtime.spawn(async move {
            let _slots = slots;
            tokio::task::yield_now().await;
            panics::<()>();
        });
        assert!(runtime.block_on(task).unwrap_err().is_panic());
        rule.assert_in_flight(0);
    }
}
