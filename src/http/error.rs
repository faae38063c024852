//! Errors of single requests: the cause, the side that caused it, and the messages for client and log.
//!
//! Every conversion matches exhaustively, so that a new error cannot be forgotten. `responses` sends an error to the
//! client, `proxy` logs it once. A refusal by a rule is not an error.

use std::fmt;

use http::HeaderName;

use crate::jwt::token::TokenError;

/// The side that caused an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Client,
    Upstream,
    Gateway,
}

/// Why a request failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RequestError {
    /// The form of the request target is not supported.
    Target(&'static str),
    /// Host is missing, repeated, malformed, or differs from the request target.
    Host(&'static str),
    /// The path is ambiguous.
    Path(&'static str),
    /// A query parameter that a key consists of cannot be decoded.
    Query(&'static str),
    /// Transfer-Encoding and Content-Length do not determine the end of the body.
    Framing(&'static str),
    /// The head exceeds the limit.
    HeadTooLarge,
    /// The request target exceeds the limit.
    TargetTooLong,
    /// The head is not HTTP.
    Malformed,
    /// The head took too long to arrive.
    HeadTimeout,
    /// The client closed the connection before its head was complete. This error is never sent.
    HeadIncomplete,
    /// A stream beyond the limits of its HTTP/2 connection. Sent as REFUSED_STREAM.
    StreamRefused,
    /// Plain HTTP on a TLS port.
    Cleartext,
    /// The connection limit is reached.
    TooManyConnections,
    /// CONNECT and TRACE.
    Method,
    /// CONNECT for a protocol that the gateway or the route does not serve.
    Protocol(&'static str),
    Expectation,
    NoRoute,
    /// A field that routes match by value is given more than once.
    RouteField(HeaderName),
    /// A proxy asks about a request whose method, target or host it does not name, or names twice.
    OriginalRequest(&'static str),
    /// The request lacks a part of a rule's key.
    KeyMissing {
        rule: String,
        part: String,
    },
    /// The request gives a part of a rule's key more than once, or so that servers differ about it.
    KeyAmbiguous {
        rule: String,
        part: String,
    },
    /// A part of a rule's key has bytes outside of printable ASCII, or is in credentials that are not Base64.
    KeyMalformed {
        rule: String,
        part: String,
    },
    /// A part of a rule's key names no client, and the rule has `on_unknown_key = "refuse"`.
    KeyUnknown {
        rule: String,
        part: String,
    },
    /// The field with the cost of the request is malformed or exceeds the maximum.
    Cost {
        rule: String,
        field: String,
        max: u32,
    },
    /// The token is invalid, and a key consists of one of its claims.
    Token(TokenError),
    /// The request body is incomplete or malformed.
    Body,
    /// The client stopped sending the body.
    BodyTimeout,
    /// The client sends the body below the minimum rate.
    BodyTooSlow,
    /// The body exceeds this number of bytes.
    BodyTooLarge(u64),
    /// The client does not read the response, or too slowly. This error is never sent.
    Stalled,
    /// No connection to a server could be opened.
    Connect(String),
    ConnectTimeout,
    /// The upstream closed the connection or sent malformed HTTP.
    Upstream(String),
    ResponseTimeout,
    /// The whole request took too long.
    RequestTimeout,
    /// The request limit of the upstream is reached.
    Overloaded,
    /// The shared store is unreachable, and the rule refuses requests that it cannot count.
    StoreUnavailable,
    /// The key set that verifies tokens was not fetched yet, or too long ago.
    KeySetUnavailable,
    /// A defect of the gateway.
    Panic,
}

impl RequestError {
    /// The two fields may give different ends of the body.
    pub const CONFLICTING_LENGTHS: RequestError =
        RequestError::Framing("both Transfer-Encoding and Content-Length are given");
    pub const REPEATED_LENGTH: RequestError = RequestError::Framing("Content-Length is given more than once");
    pub const UNKNOWN_PROTOCOL: RequestError =
        RequestError::Protocol("the only protocol supported for CONNECT is `websocket`");
    pub const WEBSOCKET_NOT_SERVED: RequestError = RequestError::Protocol("this route does not serve WebSocket");
    /// Other servers may not accept a bare line feed as the end of a line.
    pub const BARE_LINE_FEED: RequestError = RequestError::Framing("a line ends in a line feed alone");

    /// Names of errors in metrics, by [`RequestError::kind_index`].
    pub const KINDS: [&str; 39] = [
        "target",
        "host",
        "path",
        "query",
        "framing",
        "head_too_large",
        "target_too_long",
        "malformed",
        "head_timeout",
        "method",
        "expectation",
        "no_route",
        "key_missing",
        "key_ambiguous",
        "cost",
        "token",
        "body",
        "body_timeout",
        "body_too_slow",
        "body_too_large",
        "stalled",
        "connect",
        "connect_timeout",
        "upstream",
        "response_timeout",
        "panic",
        "cleartext",
        "too_many_connections",
        "request_timeout",
        "overloaded",
        "protocol",
        "store_unavailable",
        "route_field",
        "key_malformed",
        "key_unknown",
        "head_incomplete",
        "stream_refused",
        "key_set_unavailable",
        "original_request",
    ];

    /// The position of the name in [`RequestError::KINDS`].
    pub fn kind_index(&self) -> usize {
        match self {
            RequestError::Target(_) => 0,
            RequestError::Host(_) => 1,
            RequestError::Path(_) => 2,
            RequestError::Query(_) => 3,
            RequestError::Framing(_) => 4,
            RequestError::HeadTooLarge => 5,
            RequestError::TargetTooLong => 6,
            RequestError::Malformed => 7,
            RequestError::HeadTimeout => 8,
            RequestError::Method => 9,
            RequestError::Expectation => 10,
            RequestError::NoRoute => 11,
            RequestError::KeyMissing { .. } => 12,
            RequestError::KeyAmbiguous { .. } => 13,
            RequestError::Cost { .. } => 14,
            RequestError::Token(_) => 15,
            RequestError::Body => 16,
            RequestError::BodyTimeout => 17,
            RequestError::BodyTooSlow => 18,
            RequestError::BodyTooLarge(_) => 19,
            RequestError::Stalled => 20,
            RequestError::Connect(_) => 21,
            RequestError::ConnectTimeout => 22,
            RequestError::Upstream(_) => 23,
            RequestError::ResponseTimeout => 24,
            RequestError::Panic => 25,
            RequestError::Cleartext => 26,
            RequestError::TooManyConnections => 27,
            RequestError::RequestTimeout => 28,
            RequestError::Overloaded => 29,
            RequestError::Protocol(_) => 30,
            RequestError::StoreUnavailable => 31,
            RequestError::RouteField(_) => 32,
            RequestError::OriginalRequest(_) => 38,
            RequestError::KeyMalformed { .. } => 33,
            RequestError::KeyUnknown { .. } => 34,
            RequestError::HeadIncomplete => 35,
            RequestError::StreamRefused => 36,
            RequestError::KeySetUnavailable => 37,
        }
    }

    pub fn side(&self) -> Side {
        match self {
            RequestError::Target(_)
            | RequestError::Host(_)
            | RequestError::Path(_)
            | RequestError::Query(_)
            | RequestError::Framing(_)
            | RequestError::HeadTooLarge
            | RequestError::TargetTooLong
            | RequestError::Malformed
            | RequestError::HeadTimeout
            | RequestError::HeadIncomplete
            | RequestError::StreamRefused
            | RequestError::Cleartext
            | RequestError::TooManyConnections
            | RequestError::Method
            | RequestError::Protocol(_)
            | RequestError::Expectation
            | RequestError::NoRoute
            | RequestError::RouteField(_)
            | RequestError::OriginalRequest(_)
            | RequestError::KeyMissing { .. }
            | RequestError::KeyAmbiguous { .. }
            | RequestError::KeyMalformed { .. }
            | RequestError::KeyUnknown { .. }
            | RequestError::Cost { .. }
            | RequestError::Token(_)
            | RequestError::Body
            | RequestError::BodyTimeout
            | RequestError::BodyTooSlow
            | RequestError::BodyTooLarge(_)
            | RequestError::Stalled => Side::Client,
            RequestError::Connect(_)
            | RequestError::ConnectTimeout
            | RequestError::Upstream(_)
            | RequestError::ResponseTimeout
            | RequestError::RequestTimeout
            | RequestError::Overloaded => Side::Upstream,
            RequestError::StoreUnavailable | RequestError::KeySetUnavailable | RequestError::Panic => Side::Gateway,
        }
    }

    /// Whether the connection closes after the response, because the bytes that follow could be misread.
    pub fn closes_connection(&self) -> bool {
        match self {
            RequestError::Target(_)
            | RequestError::Host(_)
            | RequestError::Path(_)
            | RequestError::Query(_)
            | RequestError::Framing(_)
            | RequestError::HeadTooLarge
            | RequestError::TargetTooLong
            | RequestError::Malformed
            | RequestError::HeadTimeout
            | RequestError::HeadIncomplete
            | RequestError::Cleartext
            | RequestError::TooManyConnections
            | RequestError::Method
            | RequestError::Expectation
            | RequestError::RouteField(_)
            | RequestError::OriginalRequest(_)
            | RequestError::KeyAmbiguous { .. }
            | RequestError::Cost { .. }
            | RequestError::Body
            | RequestError::BodyTimeout
            | RequestError::BodyTooSlow
            | RequestError::BodyTooLarge(_)
            | RequestError::Stalled
            | RequestError::Panic => true,
            RequestError::NoRoute
            | RequestError::StreamRefused
            | RequestError::Protocol(_)
            | RequestError::KeyMissing { .. }
            | RequestError::KeyMalformed { .. }
            | RequestError::KeyUnknown { .. }
            | RequestError::Token(_)
            | RequestError::Connect(_)
            | RequestError::ConnectTimeout
            | RequestError::Upstream(_)
            | RequestError::ResponseTimeout
            | RequestError::RequestTimeout
            | RequestError::Overloaded
            | RequestError::StoreUnavailable
            | RequestError::KeySetUnavailable => false,
        }
    }
}

impl RequestError {
    /// Whether the client broke off its body or sent a wrong one, after the request was forwarded.
    pub fn is_of_request_body(&self) -> bool {
        matches!(
            self,
            RequestError::Body | RequestError::BodyTimeout | RequestError::BodyTooSlow | RequestError::BodyTooLarge(_)
        )
    }

    /// Whether the error is logged even if requests are not.
    pub fn is_logged_as_warning(&self) -> bool {
        self.side() != Side::Client
    }

    /// The message for the log, with details that the client does not get.
    pub fn operator_message(&self) -> String {
        match self {
            RequestError::Connect(cause) | RequestError::Upstream(cause) => format!("{self}: {cause}"),
            RequestError::KeyMissing { rule, .. }
            | RequestError::KeyAmbiguous { rule, .. }
            | RequestError::KeyMalformed { rule, .. }
            | RequestError::KeyUnknown { rule, .. }
            | RequestError::Cost { rule, .. } => {
                format!("{self} (rule `{rule}`)")
            }
            other => other.to_string(),
        }
    }
}

impl fmt::Display for RequestError {
    /// The message for the client, without internals such as addresses of servers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestError::Target(message)
            | RequestError::Host(message)
            | RequestError::Path(message)
            | RequestError::Query(message)
            | RequestError::Framing(message)
            | RequestError::Protocol(message) => f.write_str(message),
            RequestError::HeadTooLarge => f.write_str("the head of the request is too large"),
            RequestError::TargetTooLong => f.write_str("the request target is too long"),
            RequestError::Malformed => f.write_str("the request is not well-formed HTTP"),
            RequestError::HeadTimeout => f.write_str("the head of the request took too long"),
            RequestError::HeadIncomplete => f.write_str("the head of the request is incomplete"),
            RequestError::StreamRefused => f.write_str("the connection has too many requests"),
            RequestError::Cleartext => f.write_str("this port speaks TLS: use https"),
            RequestError::TooManyConnections => f.write_str("there are too many connections"),
            RequestError::Method => f.write_str("the method is not allowed here"),
            RequestError::Expectation => f.write_str("the only expectation understood is `100-continue`"),
            RequestError::NoRoute => f.write_str("no route matches this request"),
            RequestError::OriginalRequest(problem) => {
                write!(f, "the request that the proxy asks about is not clear: {problem}")
            }
            RequestError::RouteField(field) => write!(f, "the request gives `{field}` more than once"),
            RequestError::KeyMissing { part, .. } => write!(f, "the request lacks `{part}`"),
            RequestError::KeyAmbiguous { part, .. } => {
                write!(f, "the request gives `{part}` more than once, or in a form that servers read differently")
            }
            RequestError::KeyMalformed { part, .. } if part == "basic-user" => {
                f.write_str("the credentials in `authorization` are not Base64")
            }
            RequestError::KeyMalformed { part, .. } => {
                write!(f, "`{part}` contains bytes other than printable ASCII")
            }
            RequestError::KeyUnknown { part, .. } => write!(f, "the value of `{part}` is not known here"),
            RequestError::Cost { field, max, .. } => write!(f, "`{field}` is not one whole number from 0 to {max}"),
            RequestError::Token(error) => write!(f, "{error}"),
            RequestError::Body => f.write_str("the body of the request is incomplete or malformed"),
            RequestError::BodyTimeout => f.write_str("the body of the request took too long"),
            RequestError::BodyTooSlow => f.write_str("the body of the request arrives too slowly"),
            RequestError::BodyTooLarge(max_bytes) => {
                write!(f, "the body of the request has more than {max_bytes} bytes")
            }
            RequestError::Stalled => f.write_str("the client did not read the response"),
            RequestError::Connect(_) => f.write_str("no upstream server could be reached"),
            RequestError::ConnectTimeout => f.write_str("connecting to the upstream server took too long"),
            RequestError::Upstream(_) => f.write_str("the response of the upstream server is incomplete or malformed"),
            RequestError::ResponseTimeout => f.write_str("the upstream server took too long to respond"),
            RequestError::RequestTimeout => f.write_str("the request took too long"),
            RequestError::Overloaded => f.write_str("the upstream has too many requests at the moment"),
            RequestError::StoreUnavailable => f.write_str("the limits cannot be checked at the moment"),
            RequestError::KeySetUnavailable => write!(f, "{}", TokenError::KeysUnavailable),
            RequestError::Panic => f.write_str("the gateway failed on this request"),
        }
    }
}

/// Why a query of the decision API failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DecisionError {
    /// No rule has this name.
    UnknownRule(String),
    /// The rule lists no key with this id.
    UnlistedKey {
        rule: String,
        id: u64,
    },
    /// The busiest keys are not counted.
    TopKeysOff,
    /// The query is malformed, with the reason.
    Malformed(String),
    TooLarge,
    Timeout,
    /// The shared store is unreachable, and the rule refuses requests that it cannot count.
    StoreUnavailable,
    /// The Host field names a host that `[admin] hosts` does not list.
    UnknownHost,
    /// The request comes from a page of another origin, in a browser that can reach the admin address.
    CrossOrigin,
    /// A `POST` without the token of `[admin] token_file`, or with another one.
    Unauthorized,
    /// As many streams of events are open as are possible.
    TooManyStreams,
    /// Another process has taken over, and has the events.
    HandedOver,
}
