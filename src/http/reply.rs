//! Every answer that the gateway makes itself, and the only place with status codes.
//!
//! Problems are told as `application/problem+json` (RFC 9457); a refusal has the problem type that
//! the IANA registry lists for an exceeded quota.

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Response, StatusCode};

use super::decision::Unanswered;
use super::fault::Fault;
use super::quota::{Stamp, number, push_number, seconds_until};
use crate::config::Refusal;
use crate::rule::book::{Book, Line, Roster};
use crate::rule::desk::Desk;

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const METRICS: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
const QUOTA_EXCEEDED: &str = "Request cannot be satisfied as assigned quota has been exceeded";
const QUOTA_TOO_SMALL: &str = "Request can never be satisfied as it costs more than the assigned quota";

/// What is recorded of a request whose client went away before the answer; it is never sent.
pub const CLIENT_GONE: u16 = 499;

/// An answer whose body is at hand.
pub type Reply = Response<Bytes>;

/// What refusals by one rule look like, as far as it does not depend on the request.
#[derive(Debug)]
pub struct Form {
    status: StatusCode,
    /// So that clients that wait do not all come back at once.
    retry_jitter_s: u64,
    body: Shape,
}

#[derive(Debug)]
enum Shape {
    /// A problem document, up to the names of the layers: of a request that may come back, and of one
    /// that costs more than there ever is.
    Problem {
        wait: Vec<u8>,
        never: Vec<u8>,
    },
    Own {
        content_type: HeaderValue,
        body: Bytes,
    },
}

impl Form {
    pub fn new(refusal: &Refusal) -> Form {
        // The configuration has been checked: a number that is no status never gets here.
        let status = refusal.status.and_then(|status| StatusCode::from_u16(status).ok());
        let status = status.unwrap_or(StatusCode::TOO_MANY_REQUESTS);
        let own = refusal.body.as_ref().and_then(|body| {
            let content_type = HeaderValue::from_str(&body.content_type).ok()?;
            Some(Shape::Own { content_type, body: Bytes::from(body.text.clone()) })
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
        let problems = || Shape::Problem { wait: problem(QUOTA_EXCEEDED, ""), never: problem(QUOTA_TOO_SMALL, detail) };
        Form { status, retry_jitter_s: refusal.retry_jitter_s, body: own.unwrap_or_else(problems) }
    }
}

/// What a refusal says: which layers were full, and when the last of them opens again. Written by
/// hand, since a gateway under attack does little else: `text` is a buffer to work in, `headers` the
/// request's map, used again. The length is left to whoever sends it. `forms` has one for each rule
/// of the book; of several that refuse, the one that blocks longest decides.
#[allow(clippy::too_many_arguments, reason = "two of them are only memory that is used again")]
pub fn refusal(
    book: &Book,
    roster: &Roster,
    desk: &Desk,
    forms: &[Form],
    now_ms: u64,
    fields: Stamp,
    text: &mut Vec<u8>,
    mut headers: HeaderMap,
) -> Reply {
    let full = || desk.charges.iter().zip(&desk.lines).filter(|(charge, _)| charge.full);
    let entry = |line: &Line| &book.entries[roster.rules[line.rule]];
    // `None`: it will never open for a request of this cost.
    let mut longest = (Some(0), 0);
    for (charge, line) in full() {
        let opens_ms = book.opens_ms(charge, entry(line), line.layer, now_ms);
        if longest.0.is_some_and(|longest_ms| opens_ms.is_none_or(|opens_ms| opens_ms > longest_ms)) {
            longest = (opens_ms, roster.rules[line.rule]);
        }
    }
    let form = &forms[longest.1];
    let again_ms = book.again_ms(roster, desk, now_ms);
    let jitter_s = if form.retry_jitter_s > 0 { fastrand::u64(..=form.retry_jitter_s) } else { 0 };
    let retry_after_s = again_ms.map(|again_ms| seconds_until(again_ms, now_ms).max(1) + jitter_s);

    headers.clear();
    let body = match &form.body {
        Shape::Own { content_type, body } => {
            headers.insert(header::CONTENT_TYPE, content_type.clone());
            // An empty body has no length of its own in the answer to HEAD.
            headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
            body.clone()
        }
        Shape::Problem { wait, never } => {
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
            headers.insert(header::CONTENT_TYPE, PROBLEM_JSON);
            Bytes::copy_from_slice(text)
        }
    };
    if let Some(retry_after_s) = retry_after_s {
        headers.insert(header::RETRY_AFTER, number(retry_after_s));
    }
    fields.put(&mut headers);
    let mut reply = Response::new(body);
    *reply.status_mut() = form.status;
    *reply.headers_mut() = headers;
    reply
}

/// What the client is told of a fault.
pub fn fault(fault: &Fault) -> Reply {
    let status = fault_status(fault);
    let mut reply = problem(status, &fault.to_string());
    if fault.closes_connection() {
        reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if *fault == Fault::Method {
        reply
            .headers_mut()
            .insert(header::ALLOW, HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"));
    }
    if let Fault::Token(_) = fault {
        // RFC 6750, section 3.
        reply
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer error=\"invalid_token\""));
    }
    reply
}

pub fn fault_status(fault: &Fault) -> StatusCode {
    match fault {
        Fault::Target(_)
        | Fault::Host(_)
        | Fault::Path(_)
        | Fault::Query(_)
        | Fault::Framing(_)
        | Fault::Malformed
        | Fault::Body => StatusCode::BAD_REQUEST,
        Fault::KeyMissing { .. } | Fault::KeyAmbiguous { .. } | Fault::Cost { .. } => StatusCode::BAD_REQUEST,
        Fault::Token(_) => StatusCode::UNAUTHORIZED,
        Fault::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        Fault::TargetTooLong => StatusCode::URI_TOO_LONG,
        Fault::HeadTimeout | Fault::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
        Fault::Method => StatusCode::METHOD_NOT_ALLOWED,
        Fault::Expectation => StatusCode::EXPECTATION_FAILED,
        Fault::NoRoute => StatusCode::NOT_FOUND,
        Fault::Connect(_) | Fault::Upstream(_) => StatusCode::BAD_GATEWAY,
        Fault::ConnectTimeout | Fault::ResponseTimeout | Fault::RequestTimeout => StatusCode::GATEWAY_TIMEOUT,
        Fault::Overloaded => StatusCode::SERVICE_UNAVAILABLE,
        Fault::Panic => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Why the decision API has no answer.
pub fn unanswered(why: &Unanswered) -> Reply {
    let (status, detail) = match why {
        Unanswered::UnknownRule(name) => (StatusCode::NOT_FOUND, format!("there is no rule `{name}`")),
        Unanswered::Malformed(what) => (StatusCode::BAD_REQUEST, what.clone()),
        Unanswered::TooLong => (StatusCode::PAYLOAD_TOO_LARGE, String::from("the question is too long")),
        Unanswered::Foreign => (StatusCode::FORBIDDEN, String::from("pages of other origins do not ask here")),
        Unanswered::TooSlow => (StatusCode::REQUEST_TIMEOUT, String::from("the question did not come in time")),
    };
    problem(status, &detail)
}

fn problem(status: StatusCode, detail: &str) -> Reply {
    let body = serde_json::json!({
        "type": "about:blank",
        "title": status.canonical_reason().unwrap_or("Error"),
        "status": status.as_u16(),
        "detail": detail,
    });
    answer(status, PROBLEM_JSON, body.to_string())
}

/// The fault that a status of hyper's own answers stands for.
pub fn fault_of_parser(status: u16) -> Fault {
    match StatusCode::from_u16(status) {
        Ok(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE) => Fault::HeadTooLarge,
        Ok(StatusCode::URI_TOO_LONG) => Fault::TargetTooLong,
        _ => Fault::Malformed,
    }
}

pub fn json(body: String) -> Reply {
    answer(StatusCode::OK, JSON, body)
}

pub fn text(body: String) -> Reply {
    answer(StatusCode::OK, TEXT, body)
}

/// A page in Prometheus's text format, version 0.0.4.
pub fn metrics(page: String) -> Reply {
    answer(StatusCode::OK, METRICS, page)
}

/// The answer of `/readyz` while the gateway drains.
pub fn not_ready(body: String) -> Reply {
    answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, body)
}

fn answer(status: StatusCode, content_type: HeaderValue, body: impl Into<Bytes>) -> Reply {
    let body = body.into();
    let mut headers = HeaderMap::with_capacity(8);
    headers.insert(header::CONTENT_TYPE, content_type);
    headers.insert(header::CONTENT_LENGTH, number(body.len() as u64));
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    *reply.headers_mut() = headers;
    reply
}
