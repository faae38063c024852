//! Every answer that the gateway makes itself, and the only place with status codes.
//!
//! Problems are told as `application/problem+json` (RFC 9457); a refusal has the problem type that
//! the IANA registry lists for an exceeded quota.

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Response, StatusCode, Version};

use super::error::RequestError;
use super::ratelimit_headers::{RateLimitFields, number, push_number, seconds_until};
use crate::config;
use crate::config::route::Body;
use crate::http::error::DecisionError;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::rule_set::{ChargePlan, LayerRef, RuleSet};

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const METRICS: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
/// Methods that a route may serve; a route takes any other but CONNECT and TRACE as well.
const ALLOW: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
const QUOTA_EXCEEDED: &str = "Request cannot be satisfied as assigned quota has been exceeded";
const QUOTA_TOO_SMALL: &str = "Request can never be satisfied as it costs more than the assigned quota";

/// What is recorded of a request whose client went away before the answer; it is never sent.
pub const CLIENT_CLOSED_REQUEST: u16 = 499;

/// An answer whose body is at hand.
pub type LocalResponse = Response<Bytes>;

/// What refusals by one rule look like, as far as it does not depend on the request.
#[derive(Debug)]
pub struct RefusalTemplate {
    status: StatusCode,
    /// So that clients that wait do not all come back at once.
    retry_jitter_s: u64,
    body: RefusalBody,
}

#[derive(Debug)]
enum RefusalBody {
    /// A problem document, up to the names of the layers: of a request that may come back, and of one
    /// that costs more than there ever is.
    Problem {
        retryable: Vec<u8>,
        never: Vec<u8>,
    },
    Custom {
        content_type: HeaderValue,
        body: Bytes,
    },
}

impl RefusalTemplate {
    pub fn new(refusal: &config::RefusalResponse) -> RefusalTemplate {
        // The configuration has been checked: a number that is no status never gets here.
        let status = refusal.status.and_then(|status| StatusCode::from_u16(status).ok());
        let status = status.unwrap_or(StatusCode::TOO_MANY_REQUESTS);
        let own = refusal.body.as_ref().and_then(|body| {
            let content_type = HeaderValue::from_str(&body.content_type).ok()?;
            Some(RefusalBody::Custom { content_type, body: Bytes::from(body.text.clone()) })
        });
        let problem = |title: &str, detail: &str| {
            let kind = "https://iana.org/assignments/http-problem-types#quota-exceeded";
            let status = status.as_u16();
            format!(
                "{{\"type\": \"{kind}\", \"title\": \"{title}\", \"status\": {status}, {detail}\"violated-policies\": ["
            )
            .into_bytes()
        };
        let detail = "\"detail\": \"waiting does not help: the request costs more than a window ever holds\", ";
        let problems =
            || RefusalBody::Problem { retryable: problem(QUOTA_EXCEEDED, ""), never: problem(QUOTA_TOO_SMALL, detail) };
        RefusalTemplate { status, retry_jitter_s: refusal.retry_jitter_s, body: own.unwrap_or_else(problems) }
    }
}

/// The answer to a request that the rules refuse.
#[derive(Debug)]
pub struct RefusalResponse {
    pub response: LocalResponse,
    /// Chance had a part in it, so the next is to be told something else.
    pub is_random: bool,
}

/// What a refusal says: which layers were full, and when the last of them opens again. Written by
/// hand, since a gateway under attack does little else: `text` is a buffer to work in, `headers` the
/// request's map, used again. `forms` has one for each rule
/// of the book; of several that refuse, the one that blocks longest decides.
#[allow(clippy::too_many_arguments, reason = "two of them are only memory that is used again")]
pub fn refusal_response(
    rule_set: &RuleSet,
    charge_plan: &ChargePlan,
    context: &DecisionContext,
    forms: &[RefusalTemplate],
    now_ms: u64,
    fields: RateLimitFields,
    text: &mut Vec<u8>,
    mut headers: HeaderMap,
) -> RefusalResponse {
    let full = || context.result.charges.iter().zip(&context.result.layers).filter(|(charge, _)| charge.is_full);
    let entry = |line: &LayerRef| &rule_set.rules[charge_plan.rules[line.rule]];
    // `None`: it will never open for a request of this cost.
    let mut longest = (Some(0), 0);
    for (charge, line) in full() {
        let opens_ms = rule_set.available_at_ms(charge, entry(line), line.layer, now_ms);
        if longest.0.is_some_and(|longest_ms| opens_ms.is_none_or(|opens_ms| opens_ms > longest_ms)) {
            longest = (opens_ms, charge_plan.rules[line.rule]);
        }
    }
    let form = &forms[longest.1];
    let again_ms = rule_set.retry_at_ms(charge_plan, context, now_ms);
    let jitter_s = if form.retry_jitter_s > 0 { fastrand::u64(..=form.retry_jitter_s) } else { 0 };
    let retry_after_s = again_ms.map(|again_ms| seconds_until(again_ms, now_ms).max(1) + jitter_s);
    let (content_type, body) = match &form.body {
        RefusalBody::Custom { content_type, body } => (content_type.clone(), body.clone()),
        RefusalBody::Problem { retryable: wait, never } => {
            text.clear();
            text.extend_from_slice(if retry_after_s.is_some() { wait } else { never });
            for (i, (_, line)) in full().enumerate() {
                // Names of rules are checked to need no escape.
                text.extend_from_slice(if i == 0 { b"\"" } else { b", \"" });
                text.extend_from_slice(entry(line).layer_name(line.layer).as_bytes());
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
    // An empty body has no length of its own in the answer to HEAD.
    headers.insert(header::CONTENT_LENGTH, number(body.len() as u64));
    if let Some(retry_after_s) = retry_after_s {
        headers.insert(header::RETRY_AFTER, number(retry_after_s));
    }
    fields.add_to(&mut headers);
    let mut reply = Response::new(body);
    *reply.status_mut() = form.status;
    *reply.headers_mut() = headers;
    RefusalResponse { response: reply, is_random: form.retry_jitter_s > 0 }
}

/// What the client is told of a fault.
pub fn error_response(fault: &RequestError) -> LocalResponse {
    let status = error_status(fault);
    let mut reply = problem_response(status, &fault.to_string());
    if fault.closes_connection() {
        reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if *fault == RequestError::Method {
        reply.headers_mut().insert(header::ALLOW, ALLOW);
    }
    if *fault == RequestError::StoreUnavailable {
        reply.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    if let RequestError::Token(_) = fault {
        // RFC 6750, section 3.
        reply
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer error=\"invalid_token\""));
    }
    reply
}

/// The answer to `OPTIONS *`, which is about the server as a whole (RFC 9110, section 9.3.7).
pub fn options_response() -> LocalResponse {
    let mut reply = direct_response(StatusCode::OK.as_u16(), None);
    reply.headers_mut().insert(header::ALLOW, ALLOW);
    reply
}

/// What a route answers by itself.
pub fn direct_response(status: u16, body: Option<&Body>) -> LocalResponse {
    // The configuration has been checked: a number that is no status never gets here.
    let status = StatusCode::from_u16(status).unwrap_or_default();
    let mut reply = match body {
        Some(body) => {
            let content_type = HeaderValue::from_str(&body.content_type).unwrap_or(TEXT);
            response(status, content_type, body.text.clone())
        }
        None => response(status, TEXT, Bytes::new()),
    };
    if body.is_none() {
        reply.headers_mut().remove(header::CONTENT_TYPE);
        if [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status) {
            reply.headers_mut().remove(header::CONTENT_LENGTH);
        }
    }
    reply
}

/// Sends a client elsewhere.
pub fn redirect_response(status: u16, to: HeaderValue) -> LocalResponse {
    let mut reply = direct_response(status, None);
    reply.headers_mut().insert(header::LOCATION, to);
    reply
}

pub fn error_status(fault: &RequestError) -> StatusCode {
    match fault {
        RequestError::Target(_)
        | RequestError::Host(_)
        | RequestError::Path(_)
        | RequestError::Query(_)
        | RequestError::Framing(_)
        | RequestError::Malformed
        | RequestError::Cleartext
        | RequestError::Body => StatusCode::BAD_REQUEST,
        RequestError::RouteField(_)
        | RequestError::KeyMissing { .. }
        | RequestError::KeyAmbiguous { .. }
        | RequestError::Cost { .. } => StatusCode::BAD_REQUEST,
        RequestError::Token(_) => StatusCode::UNAUTHORIZED,
        RequestError::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        RequestError::TargetTooLong => StatusCode::URI_TOO_LONG,
        RequestError::TooManyConnections => StatusCode::SERVICE_UNAVAILABLE,
        RequestError::HeadTimeout | RequestError::BodyTimeout | RequestError::BodyTooSlow | RequestError::Stalled => {
            StatusCode::REQUEST_TIMEOUT
        }
        RequestError::BodyTooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
        RequestError::Method => StatusCode::METHOD_NOT_ALLOWED,
        RequestError::Protocol(_) => StatusCode::NOT_IMPLEMENTED,
        RequestError::Expectation => StatusCode::EXPECTATION_FAILED,
        RequestError::NoRoute => StatusCode::NOT_FOUND,
        RequestError::Connect(_) | RequestError::Upstream(_) => StatusCode::BAD_GATEWAY,
        RequestError::ConnectTimeout | RequestError::ResponseTimeout | RequestError::RequestTimeout => {
            StatusCode::GATEWAY_TIMEOUT
        }
        RequestError::Overloaded | RequestError::StoreUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        RequestError::Panic => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// In what terms a client is told that something did not work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorFormat {
    Http,
    /// A client of gRPC looks at `grpc-status`, and takes any other status than 200 for a broken proxy.
    Grpc,
}

impl ErrorFormat {
    pub fn of(parts: &Parts) -> ErrorFormat {
        // gRPC is spoken over HTTP/2 only, and by POST. CONNECT would take its 200 for an open tunnel.
        let content_type = (parts.version == Version::HTTP_2 && parts.method == Method::POST)
            .then(|| parts.headers.get(header::CONTENT_TYPE))
            .flatten();
        let is_grpc = content_type.is_some_and(|value| {
            let rest = value.as_bytes().strip_prefix(b"application/grpc");
            rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
        });
        if is_grpc { ErrorFormat::Grpc } else { ErrorFormat::Http }
    }

    /// A refusal by a rule, as the client understands it.
    pub fn refusal(self, reply: LocalResponse) -> LocalResponse {
        match self {
            ErrorFormat::Http => reply,
            ErrorFormat::Grpc => {
                let waits = reply.headers().contains_key(header::RETRY_AFTER);
                to_grpc(reply, StatusCode::TOO_MANY_REQUESTS, if waits { QUOTA_EXCEEDED } else { QUOTA_TOO_SMALL })
            }
        }
    }

    pub fn error(self, told: &RequestError) -> LocalResponse {
        let reply = error_response(told);
        match self {
            ErrorFormat::Http => reply,
            ErrorFormat::Grpc => {
                let status = reply.status();
                to_grpc(reply, status, &told.to_string())
            }
        }
    }
}

/// Makes of an answer one that consists of trailers only, as gRPC calls it: a head that ends the stream.
fn to_grpc(mut reply: LocalResponse, status: StatusCode, message: &str) -> LocalResponse {
    let (code, message) = (grpc_status(status), encode_grpc_message(message));
    *reply.body_mut() = Bytes::new();
    *reply.status_mut() = StatusCode::OK;
    let headers = reply.headers_mut();
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::CONNECTION);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(HeaderName::from_static("grpc-status"), number(code));
    if let Ok(message) = HeaderValue::from_str(&message) {
        headers.insert(HeaderName::from_static("grpc-message"), message);
    }
    reply
}

/// The status of gRPC that stands for one of HTTP: as gRPC's own table has it (`http-grpc-status-mapping.md`),
/// but for a limit that is exceeded and for what took too long, of which gRPC's codes say more.
fn grpc_status(status: StatusCode) -> u64 {
    match status {
        // RESOURCE_EXHAUSTED
        StatusCode::TOO_MANY_REQUESTS | StatusCode::PAYLOAD_TOO_LARGE => 8,
        // DEADLINE_EXCEEDED
        StatusCode::GATEWAY_TIMEOUT | StatusCode::REQUEST_TIMEOUT => 4,
        // UNAVAILABLE
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE => 14,
        // UNAUTHENTICATED, PERMISSION_DENIED, UNIMPLEMENTED
        StatusCode::UNAUTHORIZED => 16,
        StatusCode::FORBIDDEN => 7,
        StatusCode::NOT_FOUND => 12,
        // INTERNAL
        StatusCode::BAD_REQUEST | StatusCode::INTERNAL_SERVER_ERROR => 13,
        // UNKNOWN
        _ => 2,
    }
}

/// `grpc-message` has everything but visible ASCII and blanks encoded, and the percent sign.
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

/// Why the decision API has no answer.
pub fn decision_error_response(why: &DecisionError) -> LocalResponse {
    let (status, detail) = match why {
        DecisionError::UnknownRule(name) => (StatusCode::NOT_FOUND, format!("there is no rule `{name}`")),
        DecisionError::Malformed(what) => (StatusCode::BAD_REQUEST, what.clone()),
        DecisionError::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, String::from("the question is too long")),
        DecisionError::CrossOrigin => (StatusCode::FORBIDDEN, String::from("pages of other origins do not ask here")),
        DecisionError::UnknownHost => (
            StatusCode::MISDIRECTED_REQUEST,
            String::from("the admin address has no such name: use its IP address, or list the name in `[admin] hosts`"),
        ),
        DecisionError::StoreUnavailable => {
            (StatusCode::SERVICE_UNAVAILABLE, RequestError::StoreUnavailable.to_string())
        }
        DecisionError::Timeout => (StatusCode::REQUEST_TIMEOUT, String::from("the question did not come in time")),
    };
    problem_response(status, &detail)
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

/// The fault that a status of hyper's own answers stands for.
pub fn error_of_parser_status(status: u16) -> RequestError {
    match StatusCode::from_u16(status) {
        Ok(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE) => RequestError::HeadTooLarge,
        Ok(StatusCode::URI_TOO_LONG) => RequestError::TargetTooLong,
        _ => RequestError::Malformed,
    }
}

pub fn json_response(body: String) -> LocalResponse {
    response(StatusCode::OK, JSON, body)
}

pub fn text_response(body: String) -> LocalResponse {
    response(StatusCode::OK, TEXT, body)
}

/// A page in Prometheus's text format, version 0.0.4.
pub fn metrics_response(page: String) -> LocalResponse {
    response(StatusCode::OK, METRICS, page)
}

/// The answer of `/readyz` while the gateway drains.
pub fn not_ready_response(body: String) -> LocalResponse {
    response(StatusCode::SERVICE_UNAVAILABLE, TEXT, body)
}

/// An answer as it is sent over HTTP/1.1.
pub fn http1_bytes(reply: &LocalResponse) -> Bytes {
    let mut out = Vec::with_capacity(512 + reply.body().len());
    let status = reply.status();
    out.extend_from_slice(b"HTTP/1.1 ");
    push_number(u64::from(status.as_u16()), &mut out);
    out.push(b' ');
    // As hyper has it, where there is none.
    out.extend_from_slice(status.canonical_reason().unwrap_or("<none>").as_bytes());
    out.extend_from_slice(b"\r\n");
    for (name, value) in reply.headers() {
        for piece in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            out.extend_from_slice(piece);
        }
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(reply.body());
    Bytes::from(out)
}

fn response(status: StatusCode, content_type: HeaderValue, body: impl Into<Bytes>) -> LocalResponse {
    let body = body.into();
    let mut headers = HeaderMap::with_capacity(8);
    headers.insert(header::CONTENT_TYPE, content_type);
    headers.insert(header::CONTENT_LENGTH, number(body.len() as u64));
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    *reply.headers_mut() = headers;
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_grpc_can_not_carry_is_encoded() {
        assert_eq!(encode_grpc_message("100% of `a`\n\u{e9}"), "100%25 of `a`%0A%C3%A9");
    }

    #[test]
    fn a_fault_is_told_to_grpc_by_its_own_numbers() {
        let told =
            |fault: &RequestError| ErrorFormat::Grpc.error(fault).headers()["grpc-status"].to_str().unwrap().to_owned();
        for (fault, code) in [
            (RequestError::NoRoute, "12"),
            (RequestError::Malformed, "13"),
            (RequestError::Panic, "13"),
            (RequestError::BodyTimeout, "4"),
            (RequestError::ResponseTimeout, "4"),
            (RequestError::Connect(String::new()), "14"),
            (RequestError::Expectation, "2"),
        ] {
            assert_eq!(told(&fault), code, "{fault}");
        }
        assert!(!ErrorFormat::Grpc.error(&RequestError::Malformed).headers().contains_key("connection"));
    }
}
