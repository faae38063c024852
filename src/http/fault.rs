//! What can go wrong with one request, and on whose side.
//!
//! A fault is matched exhaustively wherever it is turned into something else, so a new one can not
//! be forgotten. It is told to the client by `reply` and logged once, by the gateway. A refusal by
//! a rule is no fault.

use std::fmt;

use crate::token::Invalid;

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
    Expectation,
    NoRoute,
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
    /// No server could be connected to.
    Connect(String),
    ConnectTimeout,
    /// The upstream closed the connection, or spoke something else than HTTP.
    Upstream(String),
    ResponseTimeout,
    /// A defect of the gateway.
    Panic,
}

impl Fault {
    /// The head may give two ends to the body.
    pub const DOUBTFUL_LENGTH: Fault = Fault::Framing("both Transfer-Encoding and Content-Length are given");

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
            | Fault::Expectation
            | Fault::NoRoute
            | Fault::KeyMissing { .. }
            | Fault::KeyAmbiguous { .. }
            | Fault::Cost { .. }
            | Fault::Token(_)
            | Fault::Body
            | Fault::BodyTimeout => Side::Client,
            Fault::Connect(_) | Fault::ConnectTimeout | Fault::Upstream(_) | Fault::ResponseTimeout => Side::Upstream,
            Fault::Panic => Side::Gateway,
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
            | Fault::KeyAmbiguous { .. }
            | Fault::Cost { .. }
            | Fault::Body
            | Fault::BodyTimeout
            | Fault::Panic => true,
            Fault::NoRoute
            | Fault::KeyMissing { .. }
            | Fault::Token(_)
            | Fault::Connect(_)
            | Fault::ConnectTimeout
            | Fault::Upstream(_)
            | Fault::ResponseTimeout => false,
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
            Fault::Target(why) | Fault::Host(why) | Fault::Path(why) | Fault::Query(why) | Fault::Framing(why) => {
                f.write_str(why)
            }
            Fault::HeadTooLarge => f.write_str("the head of the request is too large"),
            Fault::TargetTooLong => f.write_str("the request target is too long"),
            Fault::Malformed => f.write_str("the request is not well-formed HTTP"),
            Fault::HeadTimeout => f.write_str("the head of the request took too long"),
            Fault::Cleartext => f.write_str("this port speaks TLS: use https"),
            Fault::Crowded => f.write_str("there are too many connections"),
            Fault::Method => f.write_str("the method is not allowed here"),
            Fault::Expectation => f.write_str("the only expectation understood is `100-continue`"),
            Fault::NoRoute => f.write_str("no route matches this request"),
            Fault::KeyMissing { part, .. } => write!(f, "the request lacks `{part}`"),
            Fault::KeyAmbiguous { part, .. } => write!(f, "the request gives `{part}` more than once"),
            Fault::Cost { field, max, .. } => write!(f, "`{field}` is not one whole number from 0 to {max}"),
            Fault::Token(invalid) => write!(f, "{invalid}"),
            Fault::Body => f.write_str("the body of the request broke off or is malformed"),
            Fault::BodyTimeout => f.write_str("the body of the request took too long"),
            Fault::Connect(_) => f.write_str("no upstream server could be reached"),
            Fault::ConnectTimeout => f.write_str("connecting to the upstream server took too long"),
            Fault::Upstream(_) => f.write_str("the upstream server's answer broke off or is malformed"),
            Fault::ResponseTimeout => f.write_str("the upstream server took too long to answer"),
            Fault::Panic => f.write_str("the gateway failed on this request"),
        }
    }
}
