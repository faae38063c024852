//! What can go wrong with one request, and on whose side.
//!
//! A fault is matched exhaustively wherever it is turned into something else, so a new one can not
//! be forgotten. It is told to the client by `reply` and logged once, by the gateway. A refusal by
//! a rule is no fault.

use std::fmt;

use http::HeaderName;

use crate::jwt::Invalid;

/// Whose doing a fault is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Client,
    Upstream,
    Gateway,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
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
    Crowded,
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
    Token(Invalid),
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
    Uncounted,
    /// A defect of the gateway.
    Panic,
}

impl Fault {
    /// The head may give two ends to the body.
    pub const DOUBTFUL_LENGTH: Fault = Fault::Framing("both Transfer-Encoding and Content-Length are given");
    pub const REPEATED_LENGTH: Fault = Fault::Framing("Content-Length is given more than once");
    pub const UNKNOWN_PROTOCOL: Fault = Fault::Protocol("the only protocol that CONNECT opens here is `websocket`");
    pub const NO_WEBSOCKET: Fault = Fault::Protocol("no WebSocket is served here");
    /// Others may not take it for the end of a line.
    pub const BARE_LINE_FEED: Fault = Fault::Framing("a line ends in a line feed alone");

    /// What faults are called in metrics, by [`Fault::kind`].
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
        "crowded",
        "request_timeout",
        "overloaded",
        "protocol",
        "uncounted",
        "route_field",
    ];

    /// The position of its name among [`Fault::KINDS`].
    pub fn kind(&self) -> usize {
        match self {
            Fault::Target(_) => 0,
            Fault::Host(_) => 1,
            Fault::Path(_) => 2,
            Fault::Query(_) => 3,
            Fault::Framing(_) => 4,
            Fault::HeadTooLarge => 5,
            Fault::TargetTooLong => 6,
            Fault::Malformed => 7,
            Fault::HeadTimeout => 8,
            Fault::Method => 9,
            Fault::Expectation => 10,
            Fault::NoRoute => 11,
            Fault::KeyMissing { .. } => 12,
            Fault::KeyAmbiguous { .. } => 13,
            Fault::Cost { .. } => 14,
            Fault::Token(_) => 15,
            Fault::Body => 16,
            Fault::BodyTimeout => 17,
            Fault::BodyTooSlow => 18,
            Fault::BodyTooLarge(_) => 19,
            Fault::Stalled => 20,
            Fault::Connect(_) => 21,
            Fault::ConnectTimeout => 22,
            Fault::Upstream(_) => 23,
            Fault::ResponseTimeout => 24,
            Fault::Panic => 25,
            Fault::Cleartext => 26,
            Fault::Crowded => 27,
            Fault::RequestTimeout => 28,
            Fault::Overloaded => 29,
            Fault::Protocol(_) => 30,
            Fault::Uncounted => 31,
            Fault::RouteField(_) => 32,
        }
    }

    pub fn side(&self) -> Side {
        match self {
            Fault::Target(_)
            | Fault::Host(_)
            | Fault::Path(_)
            | Fault::Query(_)
            | Fault::Framing(_)
            | Fault::HeadTooLarge
            | Fault::TargetTooLong
            | Fault::Malformed
            | Fault::HeadTimeout
            | Fault::Cleartext
            | Fault::Crowded
            | Fault::Method
            | Fault::Protocol(_)
            | Fault::Expectation
            | Fault::NoRoute
            | Fault::RouteField(_)
            | Fault::KeyMissing { .. }
            | Fault::KeyAmbiguous { .. }
            | Fault::Cost { .. }
            | Fault::Token(_)
            | Fault::Body
            | Fault::BodyTimeout
            | Fault::BodyTooSlow
            | Fault::BodyTooLarge(_)
            | Fault::Stalled => Side::Client,
            Fault::Connect(_)
            | Fault::ConnectTimeout
            | Fault::Upstream(_)
            | Fault::ResponseTimeout
            | Fault::RequestTimeout
            | Fault::Overloaded => Side::Upstream,
            Fault::Uncounted | Fault::Panic => Side::Gateway,
        }
    }

    /// Whether what follows on the connection could be read as something it is not.
    pub fn closes_connection(&self) -> bool {
        match self {
            Fault::Target(_)
            | Fault::Host(_)
            | Fault::Path(_)
            | Fault::Query(_)
            | Fault::Framing(_)
            | Fault::HeadTooLarge
            | Fault::TargetTooLong
            | Fault::Malformed
            | Fault::HeadTimeout
            | Fault::Cleartext
            | Fault::Crowded
            | Fault::Method
            | Fault::Expectation
            | Fault::RouteField(_)
            | Fault::KeyAmbiguous { .. }
            | Fault::Cost { .. }
            | Fault::Body
            | Fault::BodyTimeout
            | Fault::BodyTooSlow
            | Fault::BodyTooLarge(_)
            | Fault::Stalled
            | Fault::Panic => true,
            Fault::NoRoute
            | Fault::Protocol(_)
            | Fault::KeyMissing { .. }
            | Fault::Token(_)
            | Fault::Connect(_)
            | Fault::ConnectTimeout
            | Fault::Upstream(_)
            | Fault::ResponseTimeout
            | Fault::RequestTimeout
            | Fault::Overloaded
            | Fault::Uncounted => false,
        }
    }
}

impl Fault {
    /// Whether it deserves a line in the log of an operator who did not ask for every request.
    pub fn is_worth_a_warning(&self) -> bool {
        self.side() != Side::Client
    }

    /// For the operator: with what the client is not told.
    pub fn for_operator(&self) -> String {
        match self {
            Fault::Connect(why) | Fault::Upstream(why) => format!("{self}: {why}"),
            Fault::KeyMissing { rule, .. } | Fault::KeyAmbiguous { rule, .. } | Fault::Cost { rule, .. } => {
                format!("{self} (rule `{rule}`)")
            }
            other => other.to_string(),
        }
    }
}

impl fmt::Display for Fault {
    /// For the client: nothing about the inside, such as addresses of servers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Target(why) | Fault::Host(why) | Fault::Path(why) | Fault::Query(why) => f.write_str(why),
            Fault::Framing(why) | Fault::Protocol(why) => f.write_str(why),
            Fault::HeadTooLarge => f.write_str("the head of the request is too large"),
            Fault::TargetTooLong => f.write_str("the request target is too long"),
            Fault::Malformed => f.write_str("the request is not well-formed HTTP"),
            Fault::HeadTimeout => f.write_str("the head of the request took too long"),
            Fault::Cleartext => f.write_str("this port speaks TLS: use https"),
            Fault::Crowded => f.write_str("there are too many connections"),
            Fault::Method => f.write_str("the method is not allowed here"),
            Fault::Expectation => f.write_str("the only expectation understood is `100-continue`"),
            Fault::NoRoute => f.write_str("no route matches this request"),
            Fault::RouteField(field) => write!(f, "the request gives `{field}` more than once"),
            Fault::KeyMissing { part, .. } => write!(f, "the request lacks `{part}`"),
            Fault::KeyAmbiguous { part, .. } => write!(f, "the request gives `{part}` more than once"),
            Fault::Cost { field, max, .. } => write!(f, "`{field}` is not one whole number from 0 to {max}"),
            Fault::Token(invalid) => write!(f, "{invalid}"),
            Fault::Body => f.write_str("the body of the request broke off or is malformed"),
            Fault::BodyTimeout => f.write_str("the body of the request took too long"),
            Fault::BodyTooSlow => f.write_str("the body of the request comes too slowly"),
            Fault::BodyTooLarge(most) => write!(f, "the body of the request has more than {most} bytes"),
            Fault::Stalled => f.write_str("the client did not take the answer"),
            Fault::Connect(_) => f.write_str("no upstream server could be reached"),
            Fault::ConnectTimeout => f.write_str("connecting to the upstream server took too long"),
            Fault::Upstream(_) => f.write_str("the upstream server's answer broke off or is malformed"),
            Fault::ResponseTimeout => f.write_str("the upstream server took too long to answer"),
            Fault::RequestTimeout => f.write_str("the request took too long"),
            Fault::Overloaded => f.write_str("the upstream has too many requests at the moment"),
            Fault::Uncounted => f.write_str("the limits can not be checked at the moment"),
            Fault::Panic => f.write_str("the gateway failed on this request"),
        }
    }
}
/// Why there is no answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Unanswered {
    /// No rule is called so.
    UnknownRule(String),
    /// The question is malformed.
    Malformed(String),
    TooLong,
    TooSlow,
    /// The store of shared counters can not be asked, and the rule lets nobody pass uncounted.
    Uncounted,
    /// The admin address is asked by a name that is not configured.
    Host,
    /// A page of another origin asks, in the browser of somebody who can reach the admin address.
    Foreign,
}
