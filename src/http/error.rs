//! What can go wrong with one request, and on whose side.
//!
//! A fault is matched exhaustively wherever it is turned into something else, so a new one can not
//! be forgotten. It is told to the client by `reply` and logged once, by the gateway. A refusal by
//! a rule is no fault.

use std::fmt;

use http::HeaderName;

use crate::jwt::token::TokenError;

/// Whose doing a fault is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Client,
    Upstream,
    Gateway,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RequestError {
    /// The request target is none that a server answers.
    Target(&'static str),
    /// Missing, repeated, malformed, or not what the target names.
    Host(&'static str),
    /// The path names no endpoint for certain.
    Path(&'static str),
    /// A parameter that a rule counts by can not be read.
    Query(&'static str),
    /// Transfer-Encoding or Content-Length leave open where the body ends.
    Framing(&'static str),
    /// The head is longer than the gateway reads.
    HeadTooLarge,
    /// The target is longer than the gateway reads.
    TargetTooLong,
    /// The head is not HTTP.
    Malformed,
    /// The head took too long to arrive.
    HeadTimeout,
    /// HTTP in the clear, where TLS is spoken.
    Cleartext,
    /// There are as many connections as there may be.
    TooManyConnections,
    /// CONNECT and TRACE.
    Method,
    /// CONNECT for a protocol that is not served, or not here.
    Protocol(&'static str),
    Expectation,
    NoRoute,
    /// A field by whose value routes are chosen is given more than once.
    RouteField(HeaderName),
    /// A rule's key has a part that the request lacks.
    KeyMissing {
        rule: String,
        part: String,
    },
    /// A rule's key has a part that the request gives more than once.
    KeyAmbiguous {
        rule: String,
        part: String,
    },
    /// The field that tells a request's cost does not, or tells too much.
    Cost {
        rule: String,
        field: String,
        max: u32,
    },
    /// A rule counts by a claim of a token that is not valid.
    Token(TokenError),
    /// The client's body broke off or is malformed.
    Body,
    /// The client stopped sending its body.
    BodyTimeout,
    /// The client sends its body too slowly to go on waiting for it.
    BodyTooSlow,
    /// The body has more bytes than this.
    BodyTooLarge(u64),
    /// The client does not take its answer, or too slowly; it is never told.
    Stalled,
    /// No server could be connected to.
    Connect(String),
    ConnectTimeout,
    /// The upstream closed the connection, or spoke something else than HTTP.
    Upstream(String),
    ResponseTimeout,
    /// The whole took too long.
    RequestTimeout,
    /// The upstream has as many requests as it may have.
    Overloaded,
    /// A rule can not be asked for the moment, and lets nobody pass uncounted.
    StoreUnavailable,
    /// A defect of the gateway.
    Panic,
}

impl RequestError {
    /// The head may give two ends to the body.
    pub const CONFLICTING_LENGTHS: RequestError =
        RequestError::Framing("both Transfer-Encoding and Content-Length are given");
    pub const REPEATED_LENGTH: RequestError = RequestError::Framing("Content-Length is given more than once");
    pub const UNKNOWN_PROTOCOL: RequestError =
        RequestError::Protocol("the only protocol that CONNECT opens here is `websocket`");
    pub const WEBSOCKET_NOT_SERVED: RequestError = RequestError::Protocol("no WebSocket is served here");
    /// Others may not take it for the end of a line.
    pub const BARE_LINE_FEED: RequestError = RequestError::Framing("a line ends in a line feed alone");

    /// What faults are called in metrics, by [`RequestError::kind`].
    pub const KINDS: [&str; 33] = [
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
    ];

    /// The position of its name among [`RequestError::KINDS`].
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
            | RequestError::Cleartext
            | RequestError::TooManyConnections
            | RequestError::Method
            | RequestError::Protocol(_)
            | RequestError::Expectation
            | RequestError::NoRoute
            | RequestError::RouteField(_)
            | RequestError::KeyMissing { .. }
            | RequestError::KeyAmbiguous { .. }
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
            RequestError::StoreUnavailable | RequestError::Panic => Side::Gateway,
        }
    }

    /// Whether what follows on the connection could be read as something it is not.
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
            | RequestError::Cleartext
            | RequestError::TooManyConnections
            | RequestError::Method
            | RequestError::Expectation
            | RequestError::RouteField(_)
            | RequestError::KeyAmbiguous { .. }
            | RequestError::Cost { .. }
            | RequestError::Body
            | RequestError::BodyTimeout
            | RequestError::BodyTooSlow
            | RequestError::BodyTooLarge(_)
            | RequestError::Stalled
            | RequestError::Panic => true,
            RequestError::NoRoute
            | RequestError::Protocol(_)
            | RequestError::KeyMissing { .. }
            | RequestError::Token(_)
            | RequestError::Connect(_)
            | RequestError::ConnectTimeout
            | RequestError::Upstream(_)
            | RequestError::ResponseTimeout
            | RequestError::RequestTimeout
            | RequestError::Overloaded
            | RequestError::StoreUnavailable => false,
        }
    }
}

impl RequestError {
    /// Whether it deserves a line in the log of an operator who did not ask for every request.
    pub fn is_logged_as_warning(&self) -> bool {
        self.side() != Side::Client
    }

    /// For the operator: with what the client is not told.
    pub fn operator_message(&self) -> String {
        match self {
            RequestError::Connect(why) | RequestError::Upstream(why) => format!("{self}: {why}"),
            RequestError::KeyMissing { rule, .. }
            | RequestError::KeyAmbiguous { rule, .. }
            | RequestError::Cost { rule, .. } => {
                format!("{self} (rule `{rule}`)")
            }
            other => other.to_string(),
        }
    }
}

impl fmt::Display for RequestError {
    /// For the client: nothing about the inside, such as addresses of servers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestError::Target(why)
            | RequestError::Host(why)
            | RequestError::Path(why)
            | RequestError::Query(why) => f.write_str(why),
            RequestError::Framing(why) | RequestError::Protocol(why) => f.write_str(why),
            RequestError::HeadTooLarge => f.write_str("the head of the request is too large"),
            RequestError::TargetTooLong => f.write_str("the request target is too long"),
            RequestError::Malformed => f.write_str("the request is not well-formed HTTP"),
            RequestError::HeadTimeout => f.write_str("the head of the request took too long"),
            RequestError::Cleartext => f.write_str("this port speaks TLS: use https"),
            RequestError::TooManyConnections => f.write_str("there are too many connections"),
            RequestError::Method => f.write_str("the method is not allowed here"),
            RequestError::Expectation => f.write_str("the only expectation understood is `100-continue`"),
            RequestError::NoRoute => f.write_str("no route matches this request"),
            RequestError::RouteField(field) => write!(f, "the request gives `{field}` more than once"),
            RequestError::KeyMissing { part, .. } => write!(f, "the request lacks `{part}`"),
            RequestError::KeyAmbiguous { part, .. } => write!(f, "the request gives `{part}` more than once"),
            RequestError::Cost { field, max, .. } => write!(f, "`{field}` is not one whole number from 0 to {max}"),
            RequestError::Token(invalid) => write!(f, "{invalid}"),
            RequestError::Body => f.write_str("the body of the request broke off or is malformed"),
            RequestError::BodyTimeout => f.write_str("the body of the request took too long"),
            RequestError::BodyTooSlow => f.write_str("the body of the request comes too slowly"),
            RequestError::BodyTooLarge(most) => write!(f, "the body of the request has more than {most} bytes"),
            RequestError::Stalled => f.write_str("the client did not take the answer"),
            RequestError::Connect(_) => f.write_str("no upstream server could be reached"),
            RequestError::ConnectTimeout => f.write_str("connecting to the upstream server took too long"),
            RequestError::Upstream(_) => f.write_str("the upstream server's answer broke off or is malformed"),
            RequestError::ResponseTimeout => f.write_str("the upstream server took too long to answer"),
            RequestError::RequestTimeout => f.write_str("the request took too long"),
            RequestError::Overloaded => f.write_str("the upstream has too many requests at the moment"),
            RequestError::StoreUnavailable => f.write_str("the limits can not be checked at the moment"),
            RequestError::Panic => f.write_str("the gateway failed on this request"),
        }
    }
}
/// Why there is no answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DecisionError {
    /// No rule is called so.
    UnknownRule(String),
    /// The question is malformed.
    Malformed(String),
    TooLarge,
    Timeout,
    /// The store of shared counters can not be asked, and the rule lets nobody pass uncounted.
    StoreUnavailable,
    /// The admin address is asked by a name that is not configured.
    UnknownHost,
    /// A page of another origin asks, in the browser of somebody who can reach the admin address.
    CrossOrigin,
}
