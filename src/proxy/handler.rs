//! Handles one request: validates it, finds its route and keys, lets the rules decide, and forwards it.
//!
//! `handle` responds at once where it need not wait (refusals, errors); otherwise it returns a future.

use std::num::NonZeroU64;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use http::request::Parts;
use http::uri::{PathAndQuery, Uri};
use http::{Request, Response, Version, header};
use http_body::Body as _;

use super::admission::{Admission, Evaluation, PendingAdmission, evaluate};
use super::compiled_config::CompiledConfig;
use super::peer::{ConnectionInfo, Peer};
use super::request_record::RequestRecord;
use super::response::{Content, ResponseBody, error_response, finish};
use super::response_cost::PendingCost;
use super::websocket::{WebSocketHandshake, finish_handshake};
use super::worker_config::{DecisionBuffers, Target, WorkerConfig};
use super::worker_state::WorkerState;
use crate::clock::Timestamp;
use crate::config::path::ForwardPath;
use crate::http::client_plans::PlanLookup;
use crate::http::error::RequestError;
use crate::http::forwarded::ClientInfo;
use crate::http::headers::SpecialFields;
use crate::http::key_source::RequestAttributes;
use crate::http::rate_limit_key::KeyFailure;
use crate::http::ratelimit_headers::RateLimitFields;
use crate::http::request_validation::ValidatedRequest;
use crate::http::responses::{ErrorFormat, LocalResponse};
use crate::http::route_actions::{AppliedActions, RouteActions, TemplateVariables};
use crate::http::router::{self, AmbiguousHeader};
use crate::http::websocket_handshake::UpgradeMethod;
use crate::http::{headers, path_normalize, request_validation, responses};
use crate::upstream::echo;
use crate::upstream::load_balancer::RequestTraits;
use crate::upstream::request_body::{BodySource, ClientBody, MinUploadRate, RequestBody, UploadLimits};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;

/// A request in progress. A panic while it is handled becomes a 500 response; the worker goes on.
pub enum ResponseFuture {
    /// `None` once the response was taken, and after a panic.
    Done(Option<Response<ResponseBody>>),
    /// The output is the response, or the next thing to wait for.
    Forward(Pin<Box<dyn Future<Output = ResponseFuture>>>),
}

impl ResponseFuture {
    pub fn start(handle: impl FnOnce() -> ResponseFuture) -> ResponseFuture {
        let started = catch_unwind(AssertUnwindSafe(handle));
        started.unwrap_or_else(|_panic| ResponseFuture::Done(Some(panic_response())))
    }

    /// The response, if there is nothing to wait for.
    pub fn take_ready(&mut self) -> Option<Response<ResponseBody>> {
        match self {
            ResponseFuture::Done(response) => Some(response.take().unwrap_or_else(panic_response)),
            ResponseFuture::Forward(_) => None,
        }
    }

    pub fn poll_response(&mut self, cx: &mut Context<'_>) -> Poll<Response<ResponseBody>> {
        loop {
            *self = match self {
                ResponseFuture::Done(response) => {
                    return Poll::Ready(response.take().unwrap_or_else(panic_response));
                }
                ResponseFuture::Forward(next) => match catch_unwind(AssertUnwindSafe(|| next.as_mut().poll(cx))) {
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
}

/// Where a request goes, and how the route changes it.
struct ForwardPlan {
    /// Position in `CompiledConfig::routes`.
    route: usize,
    websocket: Option<Box<WebSocketHandshake>>,
    /// Hash that selects the server, for upstreams with hash load balancing.
    server_key: Option<NonZeroU64>,
    actions: Option<Box<AppliedActions>>,
    /// Answers the request instead of the upstream: the key of one rule could not be read, after other rules were charged.
    error: Option<Box<RequestError>>,
}

/// What is known about a request besides its head.
struct RequestContext<'a> {
    peer: &'a Peer,
    client: ClientInfo,
    /// Lower bound, from the head.
    body_bytes: u64,
    now: Timestamp,
}

/// Handles a request up to the head of its response. `check_raw_head` is called with the special fields of the head, and
/// returns errors that only the raw bytes of the head show.
pub fn handle(
    worker: &Rc<WorkerState>,
    peer: &Rc<Peer>,
    request: Request<impl Into<BodySource>>,
    check_raw_head: impl FnOnce(SpecialFields) -> Option<RequestError>,
) -> ResponseFuture {
    let now = worker.clock.now();
    let config = worker.config();
    peer.body_timeout.set(config.compiled.config.timeouts.body);
    let (mut parts, body) = request.into_parts();
    let body = ClientBody::new(body, &parts.headers, peer.body_drain.as_ref());
    let format = ErrorFormat::of(&parts);
    let client = identify_client(&config.compiled, peer, &parts);
    let mut record = RequestRecord::new(worker, &config, client.address, &parts, now);
    let request_context = RequestContext { peer, client, body_bytes: body.size_hint().lower(), now };
    let (mut plan, admission, pending) =
        match decide(worker, &config, &request_context, &mut parts, check_raw_head, &mut record) {
            Ok(RequestOutcome::Forward { plan, admission, pending }) => (plan, admission, pending),
            Ok(RequestOutcome::Respond(reply)) => {
                return ResponseFuture::Done(Some(finish(format.refusal(reply).map(Content::from), record)));
            }
            Err(error) => {
                record.release_all_slots();
                return ResponseFuture::Done(Some(error_response(&error, format, record)));
            }
        };
    // Taken apart here, so that the future below stores each value only once.
    let Admission { mut fields, mut delay, mut pending_cost } = admission;
    let upload = match plan.websocket {
        Some(_) => RequestBody::Upgrade,
        None => RequestBody::new(body, || upload_limits(worker, &config.compiled, plan.route)),
    };
    let (peer, worker) = (Rc::clone(peer), Rc::clone(worker));
    let request = Box::new(Request::from_parts(parts, upload));
    // Rare waits are boxed, so that the future of every other request does not reserve memory for them.
    ResponseFuture::Forward(Box::pin(async move {
        if let Some(pending) = pending {
            match Box::pin(pending.resolve(&worker, &config, &peer, &mut record)).await {
                Ok(admission) => Admission { fields, delay, pending_cost } = admission,
                Err(rejection) => return ResponseFuture::Done(Some(rejection.into_response(format, record))),
            }
        }
        if let Some(delay) = delay.take() {
            fields = match Box::pin(delay.wait(&mut record, &mut pending_cost)).await {
                Ok(fields) => fields,
                Err(rejection) => return ResponseFuture::Done(Some(rejection.into_response(format, record))),
            };
        }
        let response = match forward(&config, &peer, &mut plan, request, &mut record).await {
            Ok(response) => {
                if let Some(handshake) = plan.websocket.take() {
                    return ResponseFuture::Forward(Box::pin(async move {
                        let idle_timeout = config.compiled.config.timeouts.tunnel;
                        let finished =
                            finish_handshake(response, handshake, format, record, &peer.tunnel, idle_timeout);
                        ResponseFuture::Done(Some(settle(finished.await, fields, pending_cost)))
                    }));
                }
                finish(response, record)
            }
            Err(error) => error_response(&error, format, record),
        };
        ResponseFuture::Done(Some(settle(response, fields, pending_cost)))
    }))
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

/// The client: the peer, or the client that a trusted proxy names.
fn identify_client(compiled: &CompiledConfig, peer: &Peer, parts: &Parts) -> ClientInfo {
    let ConnectionInfo { address, is_secure, .. } = *peer.connection;
    match &compiled.trusted_proxies {
        None => ClientInfo { address, is_secure, trusted_header: None },
        Some(trusted_proxies) => trusted_proxies.client(address, is_secure, &parts.headers),
    }
}

/// Validates the request, finds its route and keys, and charges its rules. Never waits.
fn decide(
    worker: &Rc<WorkerState>,
    config: &Rc<WorkerConfig>,
    request_context: &RequestContext<'_>,
    parts: &mut Parts,
    check_raw_head: impl FnOnce(SpecialFields) -> Option<RequestError>,
    record: &mut RequestRecord,
) -> Result<RequestOutcome, RequestError> {
    let (compiled, now) = (&*config.compiled, request_context.now);
    if parts.version != Version::HTTP_11 {
        request_validation::translate(parts)?;
    }
    let validated = request_validation::validate(parts)?;
    if let Some(error) = check_raw_head(validated.special_fields) {
        return Err(error);
    }
    let path = match parts.uri.path() {
        "*" => return Ok(RequestOutcome::Respond(responses::options_response())),
        path => path_normalize::normalize(path, compiled.config.path_reading)?,
    };
    let mut scratch = config.scratch();
    let DecisionBuffers { context, params, text, refusal_cache } = &mut *scratch;
    let route_index = find_route(compiled, request_context, parts, &validated, &path, params, record)?;
    let route = &compiled.routes[route_index];
    let (rules_index, rules) = (route.rules_index as usize, compiled.rules_of(route));
    let attributes = RequestAttributes {
        address: request_context.client.address,
        client_cert: request_context.peer.connection.client_cert.as_deref(),
        host: &validated.host,
        method: &parts.method,
        path: &path,
        params,
        uri: &parts.uri,
        headers: &parts.headers,
        route: compiled.route_name(route_index),
        tokens: &config.token_cache,
        wall_ms: compiled.config.jwt.as_ref().map_or(0, |_| worker.clock.wall_ms()),
    };
    let error = match find_keys(config, route_index, &attributes, context) {
        // No rule has a key to charge.
        Some(error) if context.inputs.keyed_requests.iter().all(Option::is_none) => return Err(error),
        error => error.map(Box::new),
    };
    let actions = compiled.actions_of(route).filter(|_| error.is_none());
    let actions = actions
        .map(|actions| actions.evaluate(&TemplateVariables::of(&attributes, request_context.client.is_secure)))
        .transpose()?;
    let (admission, pending) = match evaluate(worker, compiled, rules_index, &attributes, context, record, now.unix_ms)?
    {
        Evaluation::Pending(pending) => (Admission::default(), Some(pending)),
        Evaluation::Decided(decision) => {
            worker.metrics.decision_took(worker.clock.instant().duration_since(now.instant));
            if let Decision::Refused = decision {
                record.release_slots(context);
            }
            record.record_decision(rules_index, context, &decision);
            let decided_ms = context.result.decided_ms;
            if let Decision::Refused = decision {
                let headers = std::mem::take(&mut parts.headers);
                let render = || config.refusal(rules_index, context, decided_ms, worker.date(), text, headers);
                return Ok(RequestOutcome::Respond(refusal_cache.response(rules_index, decided_ms, context, render)));
            }
            let policy = config.policy_fields[rules_index].as_ref();
            let fields = rules.rate_limit_template.render(context, policy, decided_ms, text);
            let store_keys = || compiled.store_keys(rules, &attributes);
            let peer = request_context.peer;
            let admission = Admission::new(decision, fields, worker, config, peer, rules_index, context, store_keys);
            (admission, None)
        }
    };
    let plan = ForwardPlan { route: route_index, websocket: None, server_key: None, actions, error };
    if plan.error.is_some() {
        return Ok(RequestOutcome::Forward { plan, admission, pending });
    }
    let hash_key = compiled.hash_keys.get(route.upstream_index as usize).and_then(Option::as_ref);
    let server_key = hash_key.and_then(|hash_key| hash_key.hash(&attributes));
    let (special_fields, websocket) = (validated.special_fields, validated.websocket);
    let normalized = (compiled.config.general.forward_path == ForwardPath::Normalized).then(|| path.into_owned());
    let plan = ForwardPlan { server_key, ..plan };
    let plan = plan.prepare(config, parts, request_context, special_fields, websocket, normalized)?;
    Ok(RequestOutcome::Forward { plan, admission, pending })
}

/// Finds the route of a request, and checks that the route takes its protocol and the size of its body.
fn find_route(
    compiled: &CompiledConfig,
    request_context: &RequestContext<'_>,
    parts: &Parts,
    validated: &ValidatedRequest<'_>,
    path: &str,
    params: &mut Vec<Range<usize>>,
    record: &mut RequestRecord,
) -> Result<usize, RequestError> {
    let (host, secure) = (&*validated.host, request_context.client.is_secure);
    let query = router::RouteQuery { host, method: &parts.method, headers: &parts.headers, path, secure };
    let found = compiled.router.find(&query, params);
    let route = found
        .map_err(|AmbiguousHeader(field)| RequestError::RouteField(field.clone()))?
        .ok_or(RequestError::NoRoute)?;
    record.set_route(route);
    if validated.websocket == Some(UpgradeMethod::ExtendedConnect) && !compiled.config.routes[route].websocket {
        return Err(RequestError::WEBSOCKET_NOT_SERVED);
    }
    // A body that is known to be too large is refused before anything is charged or read.
    match max_body_bytes(compiled, compiled.actions_of(&compiled.routes[route])) {
        Some(max_bytes) if request_context.body_bytes > max_bytes => Err(RequestError::BodyTooLarge(max_bytes)),
        _ => Ok(route),
    }
}

/// The limit of the route, or else of the configuration.
fn max_body_bytes(compiled: &CompiledConfig, actions: Option<&RouteActions>) -> Option<u64> {
    actions.and_then(|actions| actions.max_body).unwrap_or(compiled.config.limits.max_body)
}

/// Limits of size and rate for the body of a request while it is forwarded.
fn upload_limits(worker: &WorkerState, compiled: &CompiledConfig, route: usize) -> UploadLimits {
    let limits = &compiled.config.limits;
    let actions = compiled.actions_of(&compiled.routes[route]);
    let rate = actions.and_then(|actions| actions.min_request_rate).unwrap_or(limits.min_request_rate);
    UploadLimits::new(max_body_bytes(compiled, actions), MinUploadRate::new(&worker.timers, rate, limits.rate_grace))
}

impl ForwardPlan {
    /// Prepares the head for the upstream. `path` replaces the client's path, unless the route sets one.
    fn prepare(
        mut self,
        config: &WorkerConfig,
        parts: &mut Parts,
        request_context: &RequestContext<'_>,
        special_fields: SpecialFields,
        websocket: Option<UpgradeMethod>,
        path: Option<String>,
    ) -> Result<ForwardPlan, RequestError> {
        let compiled = &*config.compiled;
        let upstream = compiled.routes[self.route].upstream_index as usize;
        let supports_upgrade = || config.targets.get(upstream).is_some_and(Target::supports_upgrade);
        self.websocket = WebSocketHandshake::new(websocket, &parts.headers, || {
            compiled.config.routes[self.route].websocket && supports_upgrade()
        })?;
        let peer = &request_context.peer.connection.address_field;
        headers::forward_request(
            &mut parts.headers,
            special_fields,
            peer,
            &request_context.client,
            &compiled.key_fields,
        );
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

/// Finds the key of each rule of a route. Returns the first error; rules whose keys were found are charged nevertheless.
fn find_keys(
    config: &WorkerConfig,
    route: usize,
    attributes: &RequestAttributes<'_>,
    context: &mut DecisionContext,
) -> Option<RequestError> {
    let compiled = &*config.compiled;
    let rules = compiled.rules_of(&compiled.routes[route]);
    let plans = PlanLookup::new(compiled.clients.as_ref());
    let mut first_error = None;
    context.inputs.keyed_requests.clear();
    for (position, rule_key) in rules.rule_keys.iter().enumerate() {
        context.inputs.keyed_requests.push(match rule_key.keyed_request(attributes, &plans) {
            Ok(keyed_request) => keyed_request,
            // A shadow rule never refuses, also not for a missing key.
            Err(_) if compiled.rule_set.is_shadow(&rules.charge_plan, position) => {
                config.route_metrics[route].shadowed(position);
                None
            }
            Err(KeyFailure { error, keyed_request }) => {
                first_error.get_or_insert(error);
                keyed_request
            }
        });
    }
    first_error
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

/// Forwards a request, and prepares the head of the response for the client.
async fn forward(
    config: &WorkerConfig,
    peer: &Peer,
    plan: &mut ForwardPlan,
    mut request: Box<Request<RequestBody>>,
    record: &mut RequestRecord,
) -> Result<Response<Content>, RequestError> {
    if let Some(error) = plan.error.take() {
        return Err(*error);
    }
    let compiled = &*config.compiled;
    let route = &compiled.routes[plan.route];
    let actions = compiled.actions_of(route);
    let timeouts = actions.and_then(|actions| actions.timeouts.as_ref()).unwrap_or(&compiled.config.timeouts);
    peer.body_timeout.set(timeouts.body);
    if let Some(reply) = plan.actions.as_mut().and_then(|actions| actions.direct_response.take()) {
        return Ok(apply_response_actions(reply.map(Content::from), plan.actions.take()));
    }
    let upstream = route.upstream_index as usize;
    record.set_upstream(&compiled.config.upstreams[upstream].name);
    let response = match &config.targets[upstream] {
        Target::Echo => Box::pin(echo::respond(*request, timeouts.body, &peer.timer)).await?.map(Content::from),
        Target::Servers(servers) => {
            // HTTP/1.0 has no 1xx responses (RFC 9110, 15.2).
            let informational = (request.version() >= Version::HTTP_11).then(|| Rc::clone(&peer.informational));
            // Only HTTP/1.0 requests may lack Host.
            if informational.is_none() && !request.headers().contains_key(header::HOST) {
                request.headers_mut().insert(header::HOST, servers.authority());
            }
            *request.version_mut() = Version::HTTP_11;
            let traits = RequestTraits::of(&request, plan.server_key);
            let mut response = servers.forward(request, traits, timeouts, &peer.timer, informational).await?;
            *response.version_mut() = Version::HTTP_11;
            response.map(Content::from)
        }
    };
    Ok(apply_response_actions(response, plan.actions.take()))
}

fn apply_response_actions(mut response: Response<Content>, actions: Option<Box<AppliedActions>>) -> Response<Content> {
    if let Some(actions) = actions {
        actions.apply_to_response(response.headers_mut());
    }
    response
}
