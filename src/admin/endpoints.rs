//! The endpoints of the admin address: one table, with a row for each method of a path. From it come the dispatch, the answers to
//! other methods, the label of the metric, the check of roles, and the OpenAPI document.

use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCEPT, ALLOW, CONNECTION};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response};
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::body::Incoming;
use serde_json::Value;

use super::audit_log::AuditEntry;
use super::authorization::{self, Caller};
use super::json_objects::{
    CLIENT_LIMITS, CLIENT_PATCH, CLIENT_SETTINGS, CLIENT_WITH_USAGE, CLIENTS, DECISION, DENY_ENTRIES, DENY_ENTRY,
    EXPLANATION, GIVEN_KEY, LISTED_CLIENT, NEW_DENY_ENTRY, NEW_GRANT, NEW_KEY, QUERY, QUESTION, TOP_LISTS, UPSTREAMS,
};
use super::json_schema::Schema;
use super::{
    AdminBody, AdminScope, AdminState, DecisionApi, HEAD_TIMEOUT, client_changes, client_grants, client_limits,
    clients, dashboard, decisions, deny, events, metrics_page, openapi, top_query, upstreams,
};
use crate::decision::Operation;
use transom_config::listen::Role;
use transom_http::error::{ApiError, RequestError};
use transom_http::percent_encoding::decode_escape;
use transom_http::request_values::{Occurrence, query_parameter};
use transom_rules::responses::{self, LocalResponse};

const BODY_MAX_BYTES: usize = 64 * 1024;
/// Items of a page of a list, by default and at most.
const PAGE: usize = 100;
const PAGE_MAX: usize = 1000;
/// The label of all paths that are not served.
pub const OTHER_PATHS: &str = "other";

/// A method. `GET` serves `HEAD` too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verb {
    Get,
    Post,
    Put,
    Patch,
    Delete,
}

impl Verb {
    fn is_of(self, method: &Method) -> bool {
        match self {
            Verb::Get => [Method::GET, Method::HEAD].contains(method),
            Verb::Post => method == Method::POST,
            Verb::Put => method == Method::PUT,
            Verb::Patch => method == Method::PATCH,
            Verb::Delete => method == Method::DELETE,
        }
    }

    /// As in the OpenAPI document.
    pub fn name(self) -> &'static str {
        match self {
            Verb::Get => "get",
            Verb::Post => "post",
            Verb::Put => "put",
            Verb::Patch => "patch",
            Verb::Delete => "delete",
        }
    }

    /// As in the field Allow.
    fn methods(self) -> &'static str {
        match self {
            Verb::Get => "GET, HEAD",
            Verb::Post => "POST",
            Verb::Put => "PUT",
            Verb::Patch => "PATCH",
            Verb::Delete => "DELETE",
        }
    }
}

/// What a successful response has.
#[derive(Clone, Copy, Debug)]
pub enum Content {
    Json(&'static Schema),
    /// Text of this media type.
    Text(&'static str),
}

/// Where a request has a parameter.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    Query,
    Header,
    /// A field that the request must have.
    RequiredHeader,
}

impl Place {
    /// As in the OpenAPI document.
    pub fn name(self) -> &'static str {
        match self {
            Place::Query => "query",
            Place::Header | Place::RequiredHeader => "header",
        }
    }
}

/// A parameter of a request, beside those in its path.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    pub name: &'static str,
    pub place: Place,
    pub schema: Schema,
    pub description: &'static str,
}

/// A method of a path.
#[derive(Clone, Copy)]
pub struct Endpoint {
    pub verb: Verb,
    /// Its segments are literals and parameters, `{name}`.
    pub path: &'static str,
    /// `None`: no token is needed.
    pub role: Option<Role>,
    /// Whether the addresses of `listen.metrics` serve it. Nothing of that changes the gateway, or names a key.
    pub is_on_metrics: bool,
    /// For the OpenAPI document.
    pub summary: &'static str,
    pub parameters: &'static [Parameter],
    /// The body of requests, which is JSON.
    pub request: Option<&'static Schema>,
    /// The statuses of success.
    pub success: &'static [u16],
    /// The forms of the body of a successful response.
    pub response: &'static [Content],
    /// Statuses of responses that do not follow from the other columns, and what they mean.
    pub other_statuses: &'static [(u16, &'static str)],
    pub handle: Handler,
}

pub type Handler = fn(Call) -> Pin<Box<dyn Future<Output = Result<Response<AdminBody>, ApiError>>>>;

const UNKNOWN_NAME: (u16, &str) = (404, "No rule, client or key has this name.");
const STARTING: (u16, &str) = (503, "The gateway is starting.");
const NO_STORE: (u16, &str) = (503, "The shared store cannot be reached.");

const NO_ACCESS: (u16, &str) = (404, "The configuration has no `[access]`.");
const NOT_CHANGED: (u16, &str) = (503, "Nothing was changed, because it could not be written.");
const UNCONFIRMED: (u16, &str) = (504, "The store did not reply: the change may have been made.");

const OPEN: Endpoint = Endpoint {
    verb: Verb::Get,
    path: "",
    role: None,
    is_on_metrics: false,
    summary: "",
    parameters: &[],
    request: None,
    success: &[200],
    response: &[],
    other_statuses: &[],
    handle: |_call| complete(Ok(responses::error_response(&RequestError::NoRoute))),
};
const READ: Endpoint = Endpoint { role: Some(Role::Read), ..OPEN };
const HEALTH: Endpoint = Endpoint { is_on_metrics: true, response: &[Content::Text("text/plain")], ..OPEN };
/// A query of the decision API.
const DECIDE: Endpoint = Endpoint {
    verb: Verb::Post,
    request: Some(&QUERY),
    response: &[Content::Json(&Schema::Object(&DECISION))],
    other_statuses: &[UNKNOWN_NAME, NO_STORE],
    ..READ
};

/// A change of a client.
const CHANGE_CLIENT: Endpoint = Endpoint {
    role: Some(Role::Clients),
    path: "/v1/clients/{name}",
    parameters: &[
        Parameter {
            name: "If-Match",
            place: Place::Header,
            schema: Schema::Text,
            description: "Change only this version of the client, an ETag.",
        },
        Parameter {
            name: "If-None-Match",
            place: Place::Header,
            schema: Schema::Text,
            description: "`*`: change nothing if the client exists.",
        },
    ],
    other_statuses: &[
        (404, "No client has this name, or the client has no such key or limits, or there is no `[clients]`."),
        (409, "The change does not fit the current state, such as that of the configuration files."),
        (412, "The precondition does not hold."),
        (422, "The configuration would be invalid."),
        (503, "The change cannot be made or recorded now."),
        UNCONFIRMED,
    ],
    ..OPEN
};

const TOP_PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "by",
        place: Place::Query,
        schema: Schema::Words(&["refused", "admitted"]),
        description: "Which requests are counted; by default the refused ones.",
    },
    Parameter {
        name: "rule",
        place: Place::Query,
        schema: Schema::Text,
        description: "The name of a rule; by default all rules.",
    },
    Parameter {
        name: "limit",
        place: Place::Query,
        schema: Schema::Integer,
        description: "Keys of each rule; by default 100.",
    },
];

const LIMIT: Parameter = Parameter {
    name: "limit",
    place: Place::Query,
    schema: Schema::Integer,
    description: "Items of a page: 1 to 1000, by default 100.",
};
const AFTER: Parameter =
    Parameter { name: "after", place: Place::Query, schema: Schema::Text, description: "`next` of the page before." };
const CLIENTS_PARAMETERS: &[Parameter] = &[
    LIMIT,
    AFTER,
    Parameter {
        name: "search",
        place: Place::Query,
        schema: Schema::Text,
        description: "Only clients that have each of these words in the name, plan, subjects or networks, in any case.",
    },
    Parameter { name: "plan", place: Place::Query, schema: Schema::Text, description: "Only clients of this plan." },
];

pub static ENDPOINTS: &[Endpoint] = &[
    Endpoint {
        path: "/",
        summary: "The dashboard.",
        response: &[Content::Text("text/html")],
        handle: |_call| complete(Ok(dashboard::response())),
        ..OPEN
    },
    Endpoint {
        path: "/metrics",
        summary: "The metrics, for Prometheus.",
        response: &[Content::Text("text/plain"), Content::Text("application/openmetrics-text")],
        handle: |call| complete(Ok(metrics_page::response(&call.state, &call.parts.headers))),
        ..HEALTH
    },
    Endpoint {
        path: "/healthz",
        summary: "Whether the process runs.",
        handle: |_call| complete(Ok(responses::text_response("ok\n".to_owned()))),
        ..HEALTH
    },
    Endpoint {
        path: "/readyz",
        summary: "Whether requests can be served.",
        other_statuses: &[(503, "The gateway is not ready, or is draining.")],
        handle: |call| complete(Ok(call.state.readiness_response())),
        ..HEALTH
    },
    Endpoint {
        path: "/upstreams",
        summary: "The state of the upstream servers.",
        response: &[Content::Json(&Schema::Object(&UPSTREAMS))],
        handle: |call| complete(Ok(responses::json_response(format!("{:#}\n", upstreams(&call.state))))),
        ..OPEN
    },
    Endpoint {
        path: "/v1/limit",
        role: Some(Role::Operate),
        summary: "Decides, and charges.",
        handle: |call| Box::pin(decisions::decide(call, Operation::Limit)),
        ..DECIDE
    },
    Endpoint {
        path: "/v1/check",
        summary: "Decides only.",
        handle: |call| Box::pin(decisions::decide(call, Operation::Check)),
        ..DECIDE
    },
    Endpoint {
        path: "/v1/reset",
        role: Some(Role::Operate),
        summary: "Forgets a key.",
        handle: |call| Box::pin(decisions::decide(call, Operation::Reset)),
        ..DECIDE
    },
    Endpoint {
        path: "/v1/value",
        summary: "Reads the usage of a key.",
        handle: |call| Box::pin(decisions::decide(call, Operation::Value)),
        ..DECIDE
    },
    Endpoint {
        path: "/v1/explain",
        summary: "Says what a request would get, and why.",
        request: Some(&Schema::Object(&QUESTION)),
        response: &[Content::Json(&Schema::Object(&EXPLANATION)), Content::Text("text/plain")],
        handle: |call| Box::pin(decisions::explain(call)),
        ..DECIDE
    },
    Endpoint {
        path: "/v1/top",
        summary: "The busiest keys of each rule.",
        parameters: TOP_PARAMETERS,
        response: &[Content::Json(&Schema::Object(&TOP_LISTS))],
        other_statuses: &[(404, "No rule has this name, or keys are not counted."), STARTING],
        handle: |call| Box::pin(top_query::busiest_keys(call)),
        ..READ
    },
    Endpoint {
        path: "/v1/openapi.json",
        summary: "This document.",
        response: &[Content::Json(&Schema::Any)],
        handle: |_call| complete(Ok(json_response(&openapi::document()))),
        ..READ
    },
    Endpoint {
        path: "/v1/events",
        summary: "The state of the gateway as server-sent events, once a second.",
        parameters: &[Parameter {
            name: "hours",
            place: Place::Query,
            schema: Schema::Integer,
            description: "How many hours of history come first: 1, which is the default, 6 or 24.",
        }],
        response: &[Content::Text("text/event-stream")],
        other_statuses: &[(403, "The request comes from another origin."), (503, "Too many streams are open.")],
        handle: |call| Box::pin(std::future::ready(events::open(&call))),
        ..READ
    },
    Endpoint {
        path: "/v1/clients",
        summary: "The clients, sorted by name, a page at a time.",
        parameters: CLIENTS_PARAMETERS,
        response: &[Content::Json(&Schema::Object(&CLIENTS))],
        other_statuses: &[STARTING],
        handle: |call| complete(clients::list(&call)),
        ..READ
    },
    Endpoint {
        path: "/v1/clients/{name}",
        summary: "A client, and how much of its limits it has used.",
        response: &[Content::Json(&Schema::Object(&CLIENT_WITH_USAGE))],
        other_statuses: &[UNKNOWN_NAME, STARTING],
        handle: |call| Box::pin(clients::show(call)),
        ..READ
    },
    Endpoint {
        verb: Verb::Put,
        summary: "Replaces plan, subjects and networks of a client, or adds the client.",
        request: Some(&Schema::Object(&CLIENT_SETTINGS)),
        success: &[200, 201, 202],
        response: &[Content::Json(&Schema::Object(&LISTED_CLIENT))],
        handle: |call| Box::pin(client_changes::put(call)),
        ..CHANGE_CLIENT
    },
    Endpoint {
        verb: Verb::Patch,
        summary: "Changes plan, subjects or networks of a client, by a JSON merge patch.",
        request: Some(&Schema::Object(&CLIENT_PATCH)),
        success: &[200, 202],
        response: &[Content::Json(&Schema::Object(&LISTED_CLIENT))],
        handle: |call| Box::pin(client_changes::patch(call)),
        ..CHANGE_CLIENT
    },
    Endpoint {
        verb: Verb::Delete,
        summary: "Removes a client.",
        success: &[204],
        handle: |call| Box::pin(client_changes::delete(call)),
        ..CHANGE_CLIENT
    },
    Endpoint {
        verb: Verb::Post,
        path: "/v1/clients/{name}/keys",
        summary: "Generates an API key of a client, and returns it this once; or adds a key whose digest the request has.",
        request: Some(&Schema::Object(&GIVEN_KEY)),
        success: &[201],
        response: &[Content::Json(&Schema::Object(&NEW_KEY))],
        handle: |call| Box::pin(client_changes::add_key(call)),
        ..CHANGE_CLIENT
    },
    Endpoint {
        verb: Verb::Delete,
        path: "/v1/clients/{name}/keys/{id}",
        summary: "Revokes an API key of a client.",
        success: &[204],
        handle: |call| Box::pin(client_changes::remove_key(call)),
        ..CHANGE_CLIENT
    },
    Endpoint {
        verb: Verb::Put,
        path: "/v1/clients/{name}/limits/{rule}",
        summary: "Gives a client windows of its own in a rule, perhaps until a time.",
        request: Some(&Schema::Object(&CLIENT_LIMITS)),
        success: &[200, 202],
        response: &[Content::Json(&Schema::Object(&LISTED_CLIENT))],
        handle: |call| Box::pin(client_limits::put(call)),
        ..CHANGE_CLIENT
    },
    Endpoint {
        verb: Verb::Delete,
        path: "/v1/clients/{name}/limits/{rule}",
        summary: "Gives a client the windows of its plan again.",
        success: &[204],
        handle: |call| Box::pin(client_limits::delete(call)),
        ..CHANGE_CLIENT
    },
    Endpoint {
        verb: Verb::Post,
        path: "/v1/clients/{name}/grants",
        role: Some(Role::Operate),
        summary: "Adds tokens once to the current window of a client in a rule.",
        parameters: &[
            CHANGE_CLIENT.parameters[0],
            Parameter {
                name: client_grants::IDEMPOTENCY_KEY,
                place: Place::RequiredHeader,
                schema: Schema::Text,
                description: "Identifies the grant: a request with the same value adds nothing until the window has ended.",
            },
        ],
        request: Some(&Schema::Object(&NEW_GRANT)),
        success: &[200, 202],
        response: &[Content::Json(&Schema::Object(&LISTED_CLIENT))],
        handle: |call| Box::pin(client_grants::add(call)),
        ..CHANGE_CLIENT
    },
    Endpoint {
        path: "/v1/deny",
        summary: "The deny entries, sorted by id, a page at a time.",
        parameters: &[LIMIT, AFTER],
        response: &[Content::Json(&Schema::Object(&DENY_ENTRIES))],
        other_statuses: &[STARTING],
        handle: |call| complete(deny::list(&call)),
        ..READ
    },
    Endpoint {
        verb: Verb::Post,
        path: "/v1/deny",
        role: Some(Role::Operate),
        summary: "Denies a network, a client or a value; an entry for the same gets the new end and reason.",
        request: Some(&Schema::Object(&NEW_DENY_ENTRY)),
        response: &[Content::Json(&Schema::Object(&DENY_ENTRY))],
        other_statuses: &[NO_ACCESS, NOT_CHANGED, UNCONFIRMED],
        handle: |call| Box::pin(deny::add(call)),
        ..READ
    },
    Endpoint {
        verb: Verb::Delete,
        path: "/v1/deny/{id}",
        role: Some(Role::Operate),
        summary: "Removes a deny entry.",
        response: &[Content::Json(&Schema::Object(&DENY_ENTRY))],
        other_statuses: &[(404, "No deny entry has this id, or there is no `[access]`."), NOT_CHANGED, UNCONFIRMED],
        handle: |call| Box::pin(deny::remove(call)),
        ..READ
    },
];

/// A request to an endpoint, whose caller may make it.
pub struct Call {
    pub state: Rc<AdminState>,
    pub caller: Caller,
    pub parts: Parts,
    /// Empty, unless the endpoint takes a body.
    pub body: Bytes,
    path_values: PathValues,
}

/// The parameters in a path, with their values.
type PathValues = Vec<(&'static str, String)>;

impl Call {
    /// The value of a parameter of the path.
    pub fn path_value(&self, name: &str) -> &str {
        self.path_values.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value)
    }

    pub fn query(&self) -> &str {
        self.parts.uri.query().unwrap_or_default()
    }

    /// A parameter of the query.
    pub fn parameter(&self, name: &str) -> Result<Option<String>, ApiError> {
        query_text(self.query(), name)
    }

    /// Which page of a list is wanted: the number of items, and what comes before them.
    pub fn page(&self) -> Result<(usize, Option<String>), ApiError> {
        let malformed = || ApiError::Malformed(format!("`limit` is a number from 1 to {PAGE_MAX}"));
        let limit = self.parameter("limit")?.map_or(Ok(PAGE), |limit| limit.parse().map_err(|_other| malformed()))?;
        if !(1..=PAGE_MAX).contains(&limit) {
            return Err(malformed());
        }
        Ok((limit, self.parameter("after")?))
    }

    pub fn wants_text(&self) -> bool {
        self.parts.headers.get(ACCEPT).is_some_and(|accepted| accepted.as_bytes().starts_with(b"text/plain"))
    }

    /// The decision API of the current configuration.
    pub fn decision_api(&self) -> Result<Arc<DecisionApi>, ApiError> {
        self.state.decision_api.borrow().clone().ok_or(ApiError::Starting)
    }

    /// Begins the entry of the audit log for a change that the caller makes. Nothing may be changed if this fails.
    pub fn begin_change(&self) -> Result<AuditEntry, ApiError> {
        let settings = self.state.settings.borrow();
        AuditEntry::begin(settings.audit_log.as_ref(), &self.caller, &self.state.clock)
    }
}

/// The value of a parameter of a query.
pub fn query_text(query: &str, name: &str) -> Result<Option<String>, ApiError> {
    match query_parameter(query, name) {
        Ok(Occurrence::Absent) => Ok(None),
        Ok(Occurrence::Single(value)) => Ok(Some(String::from_utf8_lossy(&value).into_owned())),
        Ok(Occurrence::Repeated) => Err(ApiError::Malformed(format!("`{name}` is given more than once"))),
        Err(_) => Err(ApiError::Malformed(String::from("the query contains a `%` without two hex digits"))),
    }
}

/// A response of JSON.
pub fn json_response(value: &Value) -> LocalResponse {
    responses::json_response(format!("{value}\n"))
}

/// A response whose body is complete.
pub fn with_body(response: LocalResponse) -> Response<AdminBody> {
    response.map(|body| Either::Left(Full::new(body)))
}

/// The result of a handler that does not wait.
fn complete(
    response: Result<LocalResponse, ApiError>,
) -> Pin<Box<dyn Future<Output = Result<Response<AdminBody>, ApiError>>>> {
    Box::pin(std::future::ready(response.map(with_body)))
}

impl Endpoint {
    /// The values of the parameters in a path; `None` if the path is another one.
    fn path_values(&self, path: &str) -> Option<PathValues> {
        let (mut given, mut values) = (path.split('/'), Vec::new());
        for segment in self.path.split('/') {
            let given = given.next()?;
            match segment.strip_prefix('{').and_then(|parameter| parameter.strip_suffix('}')) {
                Some(name) => values.push((name, decoded(given).filter(|value| !value.is_empty())?)),
                None if segment == given => {}
                None => return None,
            }
        }
        given.next().is_none().then_some(values)
    }
}

/// A segment of a path without percent-encoding; `None` if it is not UTF-8.
fn decoded(segment: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::new(), segment.as_bytes());
    while let [first, behind @ ..] = rest {
        (rest, _) = match first {
            b'%' => (&rest[3.min(rest.len())..], bytes.push(decode_escape(rest)?)),
            byte => (behind, bytes.push(*byte)),
        };
    }
    String::from_utf8(bytes).ok()
}

/// Responds, and counts the response.
pub async fn handle(
    state: Rc<AdminState>,
    scope: AdminScope,
    request: Request<Incoming>,
) -> Result<Response<AdminBody>, Infallible> {
    let path = request.uri().path();
    let label = ENDPOINTS.iter().find(|row| row.path_values(path).is_some()).map_or(OTHER_PATHS, |row| row.path);
    let mut response =
        respond(&state, scope, request).await.unwrap_or_else(|error| with_body(responses::api_error_response(&error)));
    state.metrics.responded(label, response.status().as_u16());
    if state.accept_state.borrow().is_over() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

async fn respond(
    state: &Rc<AdminState>,
    scope: AdminScope,
    request: Request<Incoming>,
) -> Result<Response<AdminBody>, ApiError> {
    let caller = {
        let settings = state.settings.borrow();
        authorization::check_host(&request, &settings)?;
        match scope {
            AdminScope::Everything => Caller::identify(&request, &settings)?,
            AdminScope::Metrics => Caller::ANYONE,
        }
    };
    let path = request.uri().path();
    let is_served = |row: &&Endpoint| row.is_on_metrics || scope == AdminScope::Everything;
    let of_path: Vec<(&Endpoint, PathValues)> =
        ENDPOINTS.iter().filter(is_served).filter_map(|row| Some((row, row.path_values(path)?))).collect();
    if of_path.is_empty() {
        return Ok(with_body(responses::error_response(&RequestError::NoRoute)));
    }
    let allowed = of_path.iter().map(|(row, _)| row.verb.methods()).collect::<Vec<_>>().join(", ");
    let Some((row, path_values)) = of_path.into_iter().find(|(row, _)| row.verb.is_of(request.method())) else {
        let mut response = responses::error_response(&RequestError::Method);
        if let Ok(allowed) = HeaderValue::try_from(allowed) {
            response.headers_mut().insert(ALLOW, allowed);
        }
        return Ok(with_body(response));
    };
    row.role.map_or(Ok(()), |role| caller.require(role))?;
    let (parts, body) = request.into_parts();
    let body = match row.request {
        Some(_) => read_body(body).await?,
        None => Bytes::new(),
    };
    let handled = (row.handle)(Call { state: Rc::clone(state), caller, parts, body, path_values });
    if row.verb == Verb::Get {
        return handled.await;
    }
    // A change is completed and recorded, also if the client closes the connection meanwhile.
    match tokio::task::spawn_local(handled).await {
        Ok(response) => response,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_ended) => Err(ApiError::HandedOver),
        },
    }
}

async fn read_body(body: Incoming) -> Result<Bytes, ApiError> {
    let body = Limited::new(body, BODY_MAX_BYTES).collect();
    match tokio::time::timeout(HEAD_TIMEOUT, body).await {
        Ok(Ok(text)) => Ok(text.to_bytes()),
        Ok(Err(_too_long_or_broken)) => Err(ApiError::TooLarge),
        Err(_elapsed) => Err(ApiError::Timeout),
    }
}
