//! Every response that the gateway makes itself. Beside this file, only `http1_head` and `websocket_handshake` of `transom-http` name
//! status codes.
//!
//! Errors are `application/problem+json` (RFC 9457). A refusal has the problem type that the IANA registry lists for an
//! exceeded quota. [`RefusalCache`] repeats the refusal before where all that it depends on is unchanged; [`Date`] is the
//! `Date` field.

use std::rc::Rc;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Response, StatusCode, Version};
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;

use super::RouteRulesId;
use super::ratelimit_headers::{RateLimitFields, number, push_number, seconds_until};
use transom_http::error::{ApiError, GrpcCode, RequestError};
use transom_http::http1_body::write_field;
use transom_http::http1_head::{self, Framing, never_has_body};
use transom_http::request_id::{RequestId, X_REQUEST_ID};

use transom_config::key_kind::INVALID_TOKEN;
use transom_config::response_body::{Body, BodyStyle, RefusalVariable, split_refusal_variables};
use transom_config::rule::GatewayRule;
use transom_limiter::charge_plan::LayerRef;
use transom_limiter::concurrency::{ConcurrencyUsage, SlotState};
use transom_limiter::handles::{IdVec, PlanPosition, RuleId};
use transom_limiter::verdict::{Verdicts, WindowVerdict};
use transom_limiter::window_kind::{AcquireRequest, Usage};

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const HTML: HeaderValue = HeaderValue::from_static("text/html; charset=utf-8");
const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
/// Fields that SDKs of model APIs read, beside `Retry-After`.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// The usual methods. Routes accept every method other than CONNECT and TRACE.
const ALLOW: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
const QUOTA_EXCEEDED: &str = "Request cannot be satisfied as assigned quota has been exceeded";
const QUOTA_TOO_SMALL: &str = "Request can never be satisfied as it costs more than the assigned quota";

/// The status recorded for a request whose client closed the connection before the response. It is never sent.
pub const CLIENT_CLOSED_REQUEST: u16 = 499;

/// A response with a complete body.
pub type LocalResponse = Response<Bytes>;

/// The constant part of the refusals by one rule.
#[derive(Debug)]
pub struct RefusalTemplate {
    status: StatusCode,
    /// Upper bound of random seconds added to `Retry-After`, so that clients do not all retry at once.
    retry_jitter_s: u64,
    body: RefusalBody,
}

#[derive(Debug)]
enum RefusalBody {
    /// The start of a problem document, up to the names of the layers: for a request that may be retried, and for one
    /// that costs more than the limit.
    Problem {
        retryable: Vec<u8>,
        never: Vec<u8>,
    },
    Custom {
        content_type: HeaderValue,
        body: Bytes,
    },
    Template(BodyTemplate),
    /// An error of a model API: for a request that may be retried, and for one that costs more than the limit.
    Api {
        retryable: BodyTemplate,
        never: BodyTemplate,
    },
}

/// A configured body with variables.
#[derive(Debug)]
struct BodyTemplate {
    content_type: HeaderValue,
    syntax: Syntax,
    /// Literals, each with the variable that follows it.
    pieces: Vec<(String, Option<RefusalVariable>)>,
}

/// How the values of variables are written in a body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Syntax {
    Json,
    /// HTML or XML.
    Markup,
    Text,
}

impl Syntax {
    fn of(media_type: &str) -> Syntax {
        let name = media_type.split(';').next().unwrap_or_default().trim_end().to_ascii_lowercase();
        match name.rsplit(['/', '+']).next() {
            Some("json") => Syntax::Json,
            Some("html" | "xml") => Syntax::Markup,
            _ => Syntax::Text,
        }
    }

    fn write(self, value: &str, text: &mut Vec<u8>) {
        match self {
            Syntax::Json => {
                let json = serde_json::Value::from(value).to_string();
                // Without the quotes, which the configured text has.
                text.extend_from_slice(&json.as_bytes()[1..json.len() - 1]);
            }
            Syntax::Markup => value.bytes().for_each(|byte| match byte {
                b'<' | b'>' | b'&' | b'"' | b'\'' => text.extend_from_slice(format!("&#{byte};").as_bytes()),
                _ => text.push(byte),
            }),
            Syntax::Text => text.extend_from_slice(value.as_bytes()),
        }
    }
}

/// The values of the variables in the body of a refusal.
struct RefusalValues<'v> {
    /// `None`: waiting does not help.
    retry_after_s: Option<u64>,
    limit: u32,
    window: &'v str,
    rule: &'v str,
    request_id: Option<HeaderValue>,
}

impl BodyTemplate {
    fn new(text: &str, content_type: HeaderValue, syntax: Syntax) -> BodyTemplate {
        let pieces = split_refusal_variables(text).into_iter();
        let pieces = pieces.map(|(literal, variable)| (literal.to_owned(), variable)).collect();
        BodyTemplate { content_type, syntax, pieces }
    }

    /// The error of a model API.
    fn of_api(style: BodyStyle, by_usage: bool, message: &str) -> BodyTemplate {
        let text = match style {
            BodyStyle::OpenAi => {
                let kind = if by_usage { "tokens" } else { "requests" };
                format!(
                    "{{\"error\": {{\"message\": \"{message}\", \"type\": \"{kind}\", \"param\": null, \"code\": \"rate_limit_exceeded\"}}}}\n"
                )
            }
            BodyStyle::Anthropic => format!(
                "{{\"type\": \"error\", \"error\": {{\"type\": \"rate_limit_error\", \"message\": \"{message}\"}}}}\n"
            ),
        };
        BodyTemplate::new(&text, JSON, Syntax::Json)
    }

    fn write(&self, values: &RefusalValues, text: &mut Vec<u8>) {
        text.clear();
        for (literal, variable) in &self.pieces {
            text.extend_from_slice(literal.as_bytes());
            match variable {
                Some(RefusalVariable::RetryAfter) => match values.retry_after_s {
                    Some(seconds) => push_number(seconds, text),
                    None if self.syntax == Syntax::Json => text.extend_from_slice(b"null"),
                    None => {}
                },
                Some(RefusalVariable::Limit) => push_number(u64::from(values.limit), text),
                Some(RefusalVariable::Window) => self.syntax.write(values.window, text),
                Some(RefusalVariable::Rule) => self.syntax.write(values.rule, text),
                Some(RefusalVariable::RequestId) => {
                    let id = values.request_id.as_ref().and_then(|id| id.to_str().ok());
                    self.syntax.write(id.unwrap_or_default(), text);
                }
                None => {}
            }
        }
    }

    fn names_request(&self) -> bool {
        self.pieces.iter().any(|(_, variable)| *variable == Some(RefusalVariable::RequestId))
    }
}

impl RefusalTemplate {
    pub fn new(rule: &GatewayRule) -> RefusalTemplate {
        let refusal = &rule.refusal;
        // The configuration check rejects numbers that are no status.
        let status = refusal.status.and_then(|status| StatusCode::from_u16(status).ok());
        let status = status.unwrap_or(StatusCode::TOO_MANY_REQUESTS);
        let custom = refusal.body.as_ref().and_then(|body| {
            let content_type = HeaderValue::from_str(&body.content_type).ok()?;
            if split_refusal_variables(&body.text).len() == 1 {
                return Some(RefusalBody::Custom { content_type, body: Bytes::from(body.text.clone()) });
            }
            let syntax = Syntax::of(&body.content_type);
            Some(RefusalBody::Template(BodyTemplate::new(&body.text, content_type, syntax)))
        });
        let of_api = |style: BodyStyle| {
            let body = |message| BodyTemplate::of_api(style, rule.usage.is_some(), message);
            let retryable = body("Rate limit {window} reached: limit {limit}. Please try again in {retry_after}s.");
            let never = body("Request too large for rate limit {window}: limit {limit}. Waiting does not help.");
            RefusalBody::Api { retryable, never }
        };
        let custom = custom.or(refusal.body_style.map(of_api));
        let problem = |title: &str, detail: &str| {
            let problem_type = "https://iana.org/assignments/http-problem-types#quota-exceeded";
            let status = status.as_u16();
            format!(
                "{{\"type\": \"{problem_type}\", \"title\": \"{title}\", \"status\": {status}, {detail}\"violated-policies\": ["
            )
            .into_bytes()
        };
        let detail = "\"detail\": \"waiting does not help: the request costs more than the limit of a window\", ";
        let problems =
            || RefusalBody::Problem { retryable: problem(QUOTA_EXCEEDED, ""), never: problem(QUOTA_TOO_SMALL, detail) };
        RefusalTemplate { status, retry_jitter_s: refusal.retry_jitter_s, body: custom.unwrap_or_else(problems) }
    }

    pub fn status(&self) -> StatusCode {
        self.status
    }
}

/// The response to a request that the rules refuse.
#[derive(Debug)]
pub struct RefusalResponse {
    pub response: LocalResponse,
    /// The response has a random part or the id of its request, so it must not be repeated.
    pub is_unique: bool,
    /// The response states milliseconds, and not only seconds.
    states_ms: bool,
    /// Those of [`WrittenRefusal`], once they are needed.
    written_fields: Option<Rc<[u8]>>,
}

/// A refusal as HTTP/1.1 sends it: cheaper to copy than a map of its fields.
pub struct WrittenRefusal {
    pub status: StatusCode,
    /// The fields, without those that differ between copies, and the length of the body.
    pub fields: Rc<[u8]>,
    pub body: Bytes,
}

impl RefusalResponse {
    /// A copy in HTTP/1.1 syntax; `None` if the status excludes a body.
    pub fn written(&mut self) -> Option<WrittenRefusal> {
        let status = self.response.status();
        if never_has_body(status) {
            return None;
        }
        let fields = self.written_fields.get_or_insert_with(|| {
            let mut fields = Vec::new();
            for (name, value) in self.response.headers() {
                // The last two are written with the head.
                if ![X_REQUEST_ID, header::CONTENT_LENGTH, header::DATE].contains(name) {
                    write_field(name, value, &mut fields);
                }
            }
            fields.into()
        });
        Some(WrittenRefusal { status, fields: Rc::clone(fields), body: self.response.body().clone() })
    }
}

/// A refused request, with memory for its response.
pub struct RefusedRequest<'a> {
    /// The time of the refusal, Unix milliseconds.
    pub now_ms: u64,
    pub id: Option<&'a RequestId>,
    /// The map of the request, used again.
    pub headers: HeaderMap,
    /// Scratch memory.
    pub text: &'a mut Vec<u8>,
}

/// Builds the response of a refusal: which limits are reached, and when to retry. Of several refusing rules, the one that
/// blocks longest decides. Written by hand, since a gateway under attack does little else.
pub fn refusal_response(
    verdicts: Verdicts<'_>,
    templates: &IdVec<RuleId, RefusalTemplate>,
    fields: RateLimitFields,
    request: RefusedRequest<'_>,
) -> RefusalResponse {
    let RefusedRequest { now_ms, id, mut headers, text } = request;
    let without_slot = || {
        let full = verdicts.slots().iter().filter(|usage| usage.state == SlotState::Full);
        full.map(|usage| verdicts.of_rule(usage.position))
    };
    // The time at which the last of the full windows admits the request, and that window; no time: never, with this cost. A slot
    // may become free at any time, and has no window.
    let mut longest: (Option<u64>, Option<WindowVerdict<'_>>) = (Some(0), None);
    for window in verdicts.full_windows() {
        let available_ms = window.available_at_ms(now_ms);
        if longest.0.is_some_and(|longest_ms| available_ms.is_none_or(|available_ms| available_ms > longest_ms)) {
            longest = (available_ms, Some(window));
        }
    }
    let longest = longest.1;
    let position = match longest {
        Some(window) => window.layer().position,
        None => without_slot().next().map_or(PlanPosition::FIRST, |verdict| verdict.position),
    };
    let verdict = verdicts.of_rule(position);
    let template = &templates[verdict.rule_id()];
    let retry_ms = verdicts.retry_at_ms(now_ms);
    let jitter_s = if template.retry_jitter_s > 0 { fastrand::u64(..=template.retry_jitter_s) } else { 0 };
    let retry_after_s = retry_ms.map(|retry_ms| seconds_until(retry_ms, now_ms).max(1) + jitter_s);
    let from_template = |body: &BodyTemplate, text: &mut Vec<u8>| {
        let rule = verdict.rule();
        let values = RefusalValues {
            retry_after_s,
            limit: match longest {
                // A lock-out, which is in no variant, admits nothing.
                Some(window) if window.is_penalty() => 0,
                Some(window) => window.limit(),
                None => verdict.slots().map_or(0, |usage| usage.limit),
            },
            window: longest.map_or(rule.concurrent_name().unwrap_or_default(), WindowVerdict::name),
            rule: &rule.rule.name,
            request_id: id.map(RequestId::to_value),
        };
        body.write(&values, text);
        (body.content_type.clone(), Bytes::copy_from_slice(text))
    };
    let (content_type, body) = match &template.body {
        RefusalBody::Custom { content_type, body } => (content_type.clone(), body.clone()),
        RefusalBody::Template(body) => from_template(body, text),
        RefusalBody::Api { retryable, .. } if retry_after_s.is_some() => from_template(retryable, text),
        RefusalBody::Api { never, .. } => from_template(never, text),
        RefusalBody::Problem { retryable, never } => {
            text.clear();
            text.extend_from_slice(if retry_after_s.is_some() { retryable } else { never });
            let windows = verdicts.full_windows().map(WindowVerdict::name);
            let names = windows.chain(without_slot().filter_map(|verdict| verdict.rule().concurrent_name()));
            for (i, name) in names.enumerate() {
                // The configuration check allows no name that needs an escape.
                text.extend_from_slice(if i == 0 { b"\"" } else { b", \"" });
                text.extend_from_slice(name.as_bytes());
                text.push(b'"');
            }
            text.push(b']');
            if let Some(retry_after_s) = retry_after_s {
                text.extend_from_slice(b", \"retry-after\": ");
                push_number(retry_after_s, text);
            }
            text.extend_from_slice(b"}\n");
            (PROBLEM_JSON, Bytes::copy_from_slice(text))
        }
    };
    headers.clear();
    headers.insert(header::CONTENT_TYPE, content_type);
    headers.insert(header::CONTENT_LENGTH, number(body.len() as u64));
    if let Some(retry_after_s) = retry_after_s {
        headers.insert(header::RETRY_AFTER, number(retry_after_s));
    }
    if let RefusalBody::Api { .. } = template.body {
        match retry_ms {
            Some(retry_ms) => {
                // When a slot becomes free is unknown: as `Retry-After`.
                let wait_ms = if retry_ms > now_ms { retry_ms - now_ms } else { 1000 };
                // Random within the last of the random seconds, too.
                let jitter_ms = (jitter_s * 1000).saturating_sub(fastrand::u64(..1000));
                headers.insert(RETRY_AFTER_MS, number(wait_ms + jitter_ms));
            }
            None => {
                headers.insert(SHOULD_RETRY, const { HeaderValue::from_static("false") });
            }
        }
    }
    let states_ms = matches!(template.body, RefusalBody::Api { .. }) || fields.state_ms();
    fields.add_to(&mut headers);
    let mut response = Response::new(body);
    *response.status_mut() = template.status;
    *response.headers_mut() = headers;
    let names_request = matches!(&template.body, RefusalBody::Template(body) if body.names_request());
    RefusalResponse {
        response,
        states_ms,
        written_fields: None,
        is_unique: template.retry_jitter_s > 0 || names_request,
    }
}

/// The response to a request that failed.
pub fn error_response(error: &RequestError) -> LocalResponse {
    // The numbers in the table of errors are all statuses.
    let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = problem_response(status, &error.to_string());
    if error.closes_connection() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if *error == RequestError::Method {
        response.headers_mut().insert(header::ALLOW, ALLOW);
    }
    let retry_after_s = match error {
        RequestError::StoreUnavailable | RequestError::KeySetUnavailable => Some(1),
        RequestError::Unreachable { retry_after_s, .. } => Some(*retry_after_s),
        _ => None,
    };
    if let Some(retry_after_s) = retry_after_s {
        response.headers_mut().insert(header::RETRY_AFTER, number(retry_after_s));
    }
    if let Some(challenge) = challenge(error) {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
    }
    response
}

/// The challenge that a 401 must have (RFC 9110, section 15.5.2).
fn challenge(error: &RequestError) -> Option<HeaderValue> {
    match error {
        RequestError::Token(_) => Some(HeaderValue::from_static(INVALID_TOKEN)),
        RequestError::KeyUnknown(no_client) | RequestError::CredentialsMissing(no_client) => {
            HeaderValue::from_str(&no_client.challenge).ok()
        }
        _ => None,
    }
}

/// The response to `OPTIONS *`, which asks about the server as a whole (RFC 9110, section 9.3.7).
pub fn options_response() -> LocalResponse {
    let mut response = direct_response(StatusCode::OK.as_u16(), None);
    response.headers_mut().insert(header::ALLOW, ALLOW);
    response
}

/// The response to a proxy that may forward the request about which it asks.
pub fn authorized_response() -> LocalResponse {
    direct_response(StatusCode::OK.as_u16(), None)
}

/// The response that a route is configured to send itself.
pub fn direct_response(status: u16, body: Option<&Body>) -> LocalResponse {
    // The configuration check rejects numbers that are no status.
    let status = StatusCode::from_u16(status).unwrap_or_default();
    let mut response = match body {
        Some(body) => {
            let content_type = HeaderValue::from_str(&body.content_type).unwrap_or(TEXT);
            response(status, content_type, body.text.clone())
        }
        None => response(status, TEXT, Bytes::new()),
    };
    if body.is_none() {
        response.headers_mut().remove(header::CONTENT_TYPE);
        if [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status) {
            response.headers_mut().remove(header::CONTENT_LENGTH);
        }
    }
    response
}

/// A redirect to `location`.
pub fn redirect_response(status: u16, location: HeaderValue) -> LocalResponse {
    let mut response = direct_response(status, None);
    response.headers_mut().insert(header::LOCATION, location);
    response
}

/// How errors and refusals are sent to a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorFormat {
    Http,
    /// A gRPC client reads `grpc-status`, and takes any HTTP status other than 200 for a broken proxy.
    Grpc,
}

impl ErrorFormat {
    pub fn of(parts: &Parts) -> ErrorFormat {
        // gRPC uses HTTP/2 and POST only. A client of CONNECT would take the status 200 for an open tunnel.
        let content_type = (parts.version == Version::HTTP_2 && parts.method == Method::POST)
            .then(|| parts.headers.get(header::CONTENT_TYPE))
            .flatten();
        let is_grpc = content_type.is_some_and(|value| {
            let rest = value.as_bytes().strip_prefix(b"application/grpc");
            rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
        });
        if is_grpc { ErrorFormat::Grpc } else { ErrorFormat::Http }
    }

    /// The response to a refused request.
    pub fn refusal(self, response: LocalResponse) -> LocalResponse {
        match self {
            ErrorFormat::Http => response,
            ErrorFormat::Grpc => {
                let is_retryable = response.headers().contains_key(header::RETRY_AFTER);
                let message = if is_retryable { QUOTA_EXCEEDED } else { QUOTA_TOO_SMALL };
                to_grpc(response, GrpcCode::ResourceExhausted, message)
            }
        }
    }

    /// The response to a request that failed.
    pub fn error(self, error: &RequestError) -> LocalResponse {
        let response = error_response(error);
        match self {
            ErrorFormat::Http => response,
            ErrorFormat::Grpc => to_grpc(response, error.grpc_code(), &error.to_string()),
        }
    }
}

/// Converts a response to the form that gRPC calls `Trailers-Only`: a head that ends the stream.
fn to_grpc(mut response: LocalResponse, code: GrpcCode, message: &str) -> LocalResponse {
    let message = encode_grpc_message(message);
    *response.body_mut() = Bytes::new();
    *response.status_mut() = StatusCode::OK;
    let headers = response.headers_mut();
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::CONNECTION);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(HeaderName::from_static("grpc-status"), number(code as u64));
    if let Ok(message) = HeaderValue::from_str(&message) {
        headers.insert(HeaderName::from_static("grpc-message"), message);
    }
    response
}

/// Percent-encodes everything other than spaces and visible ASCII, and the percent sign.
fn encode_grpc_message(message: &str) -> String {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

/// The response to a request to the admin address that failed.
pub fn api_error_response(error: &ApiError) -> LocalResponse {
    let (status, detail) = match error {
        ApiError::UnknownRule(name) => (StatusCode::NOT_FOUND, format!("unknown rule `{name}`")),
        ApiError::UnknownClient(name) => (StatusCode::NOT_FOUND, format!("unknown client `{name}`")),
        ApiError::UnknownWindow { rule, window, known } => {
            (StatusCode::NOT_FOUND, format!("unknown window `{window}`: rule `{rule}` has `{}`", known.join("`, `")))
        }
        ApiError::UnlistedKey { rule, id } => (
            StatusCode::NOT_FOUND,
            format!(
                "rule `{rule}` lists no key with the id `{id:016x}`; after a reload, keys that are counted again have ids"
            ),
        ),
        ApiError::TopKeysOff => (StatusCode::NOT_FOUND, String::from("keys are not counted: `[admin] top_keys` is 0")),
        ApiError::Malformed(detail) => (StatusCode::BAD_REQUEST, detail.clone()),
        ApiError::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, String::from("the request body is too large")),
        ApiError::CrossOrigin => (StatusCode::FORBIDDEN, String::from("cross-origin requests are not allowed")),
        ApiError::UnknownHost => (
            StatusCode::MISDIRECTED_REQUEST,
            String::from(
                "unknown host name: use the IP address of the admin listener, or list the name in `[admin] hosts`",
            ),
        ),
        ApiError::StoreUnavailable => (StatusCode::SERVICE_UNAVAILABLE, RequestError::StoreUnavailable.to_string()),
        ApiError::Timeout => (StatusCode::REQUEST_TIMEOUT, String::from("the request took too long to arrive")),
        ApiError::TooManyStreams => (
            StatusCode::SERVICE_UNAVAILABLE,
            String::from("too many streams of events are open: close other dashboards"),
        ),
        ApiError::HandedOver => {
            (StatusCode::SERVICE_UNAVAILABLE, String::from("another process has taken over: connect again"))
        }
        ApiError::Unauthorized => {
            (StatusCode::UNAUTHORIZED, String::from("a token of `[admin]` is required: `Authorization: Bearer TOKEN`"))
        }
        ApiError::Forbidden { token, role, needed } => (
            StatusCode::FORBIDDEN,
            format!("the token `{token}` has the role `{role}`, and this needs the role `{needed}`"),
        ),
        ApiError::NoAccessFile => (StatusCode::NOT_FOUND, String::from("there is no `[access]` in the configuration")),
        ApiError::UnknownEntry(id) => (StatusCode::NOT_FOUND, format!("no deny entry has the id `{id}`")),
        ApiError::NotChanged(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("nothing was changed: {why}")),
        ApiError::Unconfirmed(why) => (
            StatusCode::GATEWAY_TIMEOUT,
            format!(
                "the change may have been made, because the store did not reply ({why}): look with `GET` before you repeat it"
            ),
        ),
        ApiError::AuditLogUnavailable => (
            StatusCode::SERVICE_UNAVAILABLE,
            String::from("nothing was changed, because the audit log cannot be written"),
        ),
        ApiError::NoClients => {
            (StatusCode::NOT_FOUND, String::from("there are no clients: the configuration has no `[clients]`"))
        }
        ApiError::UnknownKey => (StatusCode::NOT_FOUND, String::from("the client has no key with this id")),
        ApiError::UnknownLimits => {
            (StatusCode::NOT_FOUND, String::from("the client has no limits of its own in this rule"))
        }
        ApiError::PreconditionFailed => (
            StatusCode::PRECONDITION_FAILED,
            String::from(
                "nothing was changed: the client is not in the state that `If-Match` or `If-None-Match` states",
            ),
        ),
        ApiError::Conflict(reason) => (StatusCode::CONFLICT, reason.clone()),
        ApiError::Rejected(reason) => (StatusCode::UNPROCESSABLE_ENTITY, reason.clone()),
        ApiError::Unavailable(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason.clone()),
        ApiError::Starting => (StatusCode::SERVICE_UNAVAILABLE, String::from("the gateway is starting")),
    };
    let mut response = problem_response(status, &detail);
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

fn problem_response(status: StatusCode, detail: &str) -> LocalResponse {
    let body = serde_json::json!({
        "type": "about:blank",
        "title": status.canonical_reason().unwrap_or("Error"),
        "status": status.as_u16(),
        "detail": detail,
    });
    response(status, PROBLEM_JSON, body.to_string())
}

pub fn json_response(body: String) -> LocalResponse {
    response(StatusCode::OK, JSON, body)
}

/// The response of a request that has created what the response describes.
pub fn created(mut response: LocalResponse) -> LocalResponse {
    *response.status_mut() = StatusCode::CREATED;
    response
}

/// The response of a request that takes effect later.
pub fn accepted(mut response: LocalResponse) -> LocalResponse {
    *response.status_mut() = StatusCode::ACCEPTED;
    response
}

/// The response of a request that has nothing to say.
pub fn no_content_response() -> LocalResponse {
    direct_response(StatusCode::NO_CONTENT.as_u16(), None)
}

/// A response that nothing may keep, because it has a secret.
pub fn not_stored(mut response: LocalResponse) -> LocalResponse {
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

pub fn text_response(body: String) -> LocalResponse {
    response(StatusCode::OK, TEXT, body)
}

/// A page in the text format of Prometheus, version 0.0.4.
pub fn metrics_response(page: Vec<u8>, media_type: &'static str) -> LocalResponse {
    response(StatusCode::OK, HeaderValue::from_static(media_type), page)
}

/// An HTML page that browsers restrict by a content security policy.
pub fn page_response(page: &'static str, policy: &str) -> LocalResponse {
    let mut response = response(StatusCode::OK, HTML, page);
    let headers = response.headers_mut();
    // A policy without control characters.
    if let Ok(policy) = HeaderValue::from_str(policy) {
        headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(OPENER_POLICY, HeaderValue::from_static("same-origin"));
    headers.insert(RESOURCE_POLICY, HeaderValue::from_static("same-origin"));
    // After an upgrade of the gateway, the page is that of the new version.
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// The head of a stream of server-sent events.
pub fn event_stream_head() -> LocalResponse {
    let mut response = response(StatusCode::OK, EVENT_STREAM, Bytes::new());
    let headers = response.headers_mut();
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// The response to a request that is no gRPC call.
pub fn no_grpc_response() -> LocalResponse {
    problem_response(StatusCode::UNSUPPORTED_MEDIA_TYPE, "this address serves gRPC only: POST with `application/grpc`")
}

/// The response of `/readyz` while the gateway drains.
pub fn not_ready_response(body: String) -> LocalResponse {
    response(StatusCode::SERVICE_UNAVAILABLE, TEXT, body)
}

/// A response in HTTP/1.1 syntax, after which the connection is closed. `is_head`: to a HEAD request.
pub fn http1_bytes(response: &LocalResponse, is_head: bool, date: &HeaderValue) -> Bytes {
    let (mut out, framing) = (Vec::new(), Framing::Length(response.body().len() as u64));
    http1_head::write_response_head(response, framing, Version::HTTP_11, false, date, |_| (), &mut out);
    if !is_head {
        out.extend_from_slice(response.body());
    }
    Bytes::from(out)
}

fn response(status: StatusCode, content_type: HeaderValue, body: impl Into<Bytes>) -> LocalResponse {
    let body = body.into();
    let mut headers = HeaderMap::with_capacity(8);
    headers.insert(header::CONTENT_TYPE, content_type);
    headers.insert(header::CONTENT_LENGTH, number(body.len() as u64));
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// The previous refusal, repeated as long as everything it depends on is unchanged. A client over its limits often sends
/// many requests within a second and gets equal responses.
#[derive(Debug, Default)]
pub struct RefusalCache {
    /// The rules that refused.
    rules: Option<RouteRulesId>,
    now_ms: u64,
    outcomes: Vec<LayerOutcome>,
    concurrency: Vec<ConcurrencyUsage>,
    /// `None` before the first refusal.
    refused: Option<RefusalResponse>,
}

/// What a refusal depends on in one layer. It does not identify the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct LayerOutcome {
    layer: LayerRef,
    request: AcquireRequest,
    usage: Usage,
    is_full: bool,
    /// Until the window ends. With debts, the request may have to wait for a later window: then the present, Unix milliseconds.
    seconds_left: u64,
}

impl LayerOutcome {
    fn of(window: WindowVerdict<'_>, now_ms: u64) -> LayerOutcome {
        let (request, usage) = (window.request(), window.usage());
        let seconds_left = match request.kind.carries_debt() {
            true => now_ms,
            false => seconds_until(usage.end_ms, now_ms),
        };
        LayerOutcome { layer: window.layer(), request, usage, is_full: window.is_full(), seconds_left }
    }
}

impl RefusalCache {
    /// The previous response, if it is of the same second and states the same times, or that of `render`.
    pub fn refusal(
        &mut self,
        rules: RouteRulesId,
        now_ms: u64,
        verdicts: Verdicts<'_>,
        render: impl FnOnce() -> RefusalResponse,
    ) -> &mut RefusalResponse {
        let outcomes = || verdicts.windows().map(|window| LayerOutcome::of(window, now_ms));
        let is_repeatable = |refused: &RefusalResponse| match refused.states_ms {
            true => self.now_ms == now_ms,
            // That of `Date`.
            false => self.now_ms / 1000 == now_ms / 1000,
        };
        let is_same = self.refused.as_ref().is_some_and(|refused| !refused.is_unique && is_repeatable(refused))
            && self.rules == Some(rules)
            && self.outcomes.iter().copied().eq(outcomes())
            && self.concurrency == verdicts.slots();
        if !is_same {
            (self.rules, self.now_ms) = (Some(rules), now_ms);
            self.outcomes.clear();
            self.outcomes.extend(outcomes());
            self.concurrency.clear();
            self.concurrency.extend_from_slice(verdicts.slots());
            self.refused = None;
        }
        self.refused.get_or_insert_with(|| {
            let mut refused = render();
            // Replaced in each copy: another field would make the map of every copy grow.
            refused.response.headers_mut().insert(X_REQUEST_ID, HeaderValue::from_static(""));
            refused
        })
    }
}

/// The `Date` field of responses (RFC 9110, section 6.6.1), formatted once a second.
#[derive(Debug)]
pub struct Date {
    second: u64,
    value: HeaderValue,
}

impl Default for Date {
    fn default() -> Date {
        Date { second: 0, value: HeaderValue::from_static("Thu, 01 Jan 1970 00:00:00 GMT") }
    }
}

impl Date {
    /// Sets the time, in Unix milliseconds.
    pub fn update(&mut self, unix_ms: u64) {
        let second = unix_ms / 1000;
        if second == self.second {
            return;
        }
        let text = i64::try_from(second).ok().and_then(|second| {
            let moment = Timestamp::from_second(second).ok()?;
            DateTimePrinter::new().timestamp_to_rfc9110_string(&moment).ok()
        });
        // A time outside of the calendar leaves the value unchanged; no clock shows one.
        if let Some(value) = text.and_then(|text| HeaderValue::try_from(text).ok()) {
            *self = Date { second, value };
        }
    }

    pub fn value(&self) -> HeaderValue {
        self.value.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::rate_limit_key::tests::{SEED, rule};
    use transom_limiter::acquire::Charge;
    use transom_limiter::charge_plan::LayerCharge;
    use transom_limiter::decision::Decision;
    use transom_limiter::decision_context::DecisionContext;
    use transom_limiter::handles::{Handle, LayerId, LayerPosition};
    use transom_limiter::key::OnMissing;
    use transom_limiter::rule_set::{CountingMode, RuleSet};
    use transom_limiter::table::Counter;
    use transom_limiter::window_kind::WindowKind;

    #[test]
    fn bytes_not_allowed_in_a_grpc_message_are_encoded() {
        assert_eq!(encode_grpc_message("100% of `a`\n\u{e9}"), "100%25 of `a`%0A%C3%A9");
    }

    #[test]
    fn an_error_has_its_grpc_status() {
        let grpc_status_of =
            |error: &RequestError| ErrorFormat::Grpc.error(error).headers()["grpc-status"].to_str().unwrap().to_owned();
        for (error, code) in [
            (RequestError::NoRoute, "12"),
            (RequestError::Malformed, "13"),
            (RequestError::Panic, "13"),
            (RequestError::BodyTimeout, "4"),
            (RequestError::ResponseTimeout, "4"),
            (RequestError::Connect(String::new()), "14"),
            (RequestError::Expectation, "2"),
        ] {
            assert_eq!(grpc_status_of(&error), code, "{error}");
        }
        assert!(!ErrorFormat::Grpc.error(&RequestError::Malformed).headers().contains_key("connection"));
    }

    fn refusal(response: LocalResponse, states_ms: bool) -> RefusalResponse {
        RefusalResponse { response, is_unique: false, states_ms, written_fields: None }
    }

    #[test]
    fn a_written_refusal_has_the_fields_that_its_head_lacks() {
        let mut response = response(StatusCode::TOO_MANY_REQUESTS, PROBLEM_JSON, "{}");
        for (name, value) in
            [("retry-after", "7"), ("x-request-id", ""), ("date", "now"), ("ratelimit", "\"a\";r=0;t=7")]
        {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        let mut refusal = refusal(response, false);
        let written = refusal.written().unwrap();
        let fields = "content-type: application/problem+json\r\nretry-after: 7\r\nratelimit: \"a\";r=0;t=7\r\n";
        assert_eq!(
            (&*written.fields, written.status.as_u16(), &written.body[..]),
            (fields.as_bytes(), 429, &b"{}"[..])
        );
        *refusal.response.status_mut() = StatusCode::NO_CONTENT;
        assert!(refusal.written().is_none());
    }

    /// The window of the rule ends 2.5 s after `NOW_MS`.
    #[test]
    fn a_refusal_is_repeated_while_it_states_the_same_times() {
        const NOW_MS: u64 = 1_700_000_000_200;
        let rendered = |at_ms: &[u64], kind: WindowKind, states_ms: bool| {
            let (mut cache, mut context) = (RefusalCache::default(), DecisionContext::default());
            let rules = Arc::new(RuleSet::new(&[rule(&[], OnMissing::Never)], SEED, None));
            let charge_plan = rules.charge_plan([RuleId::at(0)]);
            let layer = LayerRef {
                position: PlanPosition::FIRST,
                id: LayerId { rule: RuleId::at(0), position: LayerPosition::FIRST },
            };
            let request = AcquireRequest { kind, ..AcquireRequest::plain(NOW_MS + 2500, 1, 1) };
            let mut charge = Charge::new(Counter::default(), request);
            charge.usage = Usage { used: 1, end_ms: NOW_MS + 2500 };
            context.result.charges.push(LayerCharge { layer, mode: CountingMode::Local, charge });
            let mut rendered = 0;
            for now_ms in at_ms {
                let verdicts = charge_plan.verdicts(&context, &Decision::Refused);
                cache.refusal(RouteRulesId::at(0), *now_ms, verdicts, || {
                    rendered += 1;
                    refusal(Response::new(Bytes::new()), states_ms)
                });
            }
            rendered
        };
        let second = [0, 1, 499, 500, 799, 800].map(|ms| NOW_MS + ms);
        // `t` is 3, then 2; `Date` changes after 800 ms.
        assert_eq!(rendered(&second, WindowKind::Plain, false), 3);
        assert_eq!(rendered(&second, WindowKind::Plain, true), 6);
        assert_eq!(rendered(&second, WindowKind::Accumulating, false), 6);
        assert_eq!(rendered(&[NOW_MS, NOW_MS], WindowKind::Accumulating, true), 1);
    }

    #[test]
    fn a_date_is_formatted_as_http_requires() {
        let mut date = Date::default();
        for (unix_ms, text) in [
            (999, "Thu, 01 Jan 1970 00:00:00 GMT"),
            (784_111_777_999, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (784_111_778_000, "Sun, 06 Nov 1994 08:49:38 GMT"),
            (784_111_777_000, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (u64::MAX, "Sun, 06 Nov 1994 08:49:37 GMT"),
        ] {
            date.update(unix_ms);
            assert_eq!(date.value(), text);
        }
    }
}
