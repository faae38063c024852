//! Errors of single requests: the cause, the side that caused it, and the messages for client and log.
//!
//! A new error needs a row in the table of kinds and a message. `responses` sends an error to the client, `proxy` logs it once. A
//! refusal by a rule is not an error.

use std::fmt;

use http::HeaderName;

use transom_limiter::handles::Handle as _;

/// The side that caused an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Client,
    Upstream,
    Gateway,
}

/// The codes of gRPC that responses of the gateway have. Those of errors follow the table of gRPC for HTTP statuses
/// (`http-grpc-status-mapping.md`), but with the more specific codes for an exceeded limit and for timeouts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GrpcCode {
    Unknown = 2,
    DeadlineExceeded = 4,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    Unauthenticated = 16,
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
    /// A query parameter that routes match is given more than once, or so that servers read it differently.
    RouteParameter(String),
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
    KeyUnknown(Box<NoClient>),
    /// The request lacks the part of a rule's key that names its client.
    CredentialsMissing(Box<NoClient>),
    /// A deny entry denies the request, or its route does not allow it.
    Denied,
    /// The field with the cost of the request is malformed or exceeds the maximum.
    Cost {
        rule: String,
        field: String,
        max: u32,
    },
    /// The token is invalid, for this reason, and a key consists of one of its claims.
    Token(&'static str),
    /// The request body is incomplete or malformed.
    Body,
    /// The client stopped sending the body.
    BodyTimeout,
    /// The client sends the body below the minimum rate.
    BodyTooSlow,
    /// The body exceeds this number of bytes.
    BodyTooLarge(u64),
    /// Bytes beyond the limit of a rule have passed, and the rule cuts transfers.
    LimitExceeded,
    /// Servers may read the body differently in what rules depend on.
    BodyAmbiguous(&'static str),
    /// The content coding of the body is unknown, or its data are invalid, and rules depend on the body.
    BodyCoding,
    /// The bodies that are read before their decision, or the decoders of bodies, take too much memory.
    BodyMemory,
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
    /// No server became reachable while the request could wait, or too many requests wait already.
    Unreachable {
        retry_after_s: u64,
        cause: String,
    },
    /// The list of the upstream's servers is empty at the moment.
    NoServer,
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
}

/// A request of no client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoClient {
    pub rule: String,
    /// The part of a key, as configured.
    pub part: String,
    /// What is wrong, in words for the caller.
    pub detail: String,
    /// Of `WWW-Authenticate`.
    pub challenge: String,
}

transom_limiter::handles! {
    /// A kind of errors: its position among all.
    ErrorKindId,
}

/// What all errors of one kind have in common.
struct ErrorKind {
    /// In metrics and in the log.
    name: &'static str,
    side: Side,
    /// Its phrase is the title of the response.
    status: u16,
    grpc_code: GrpcCode,
    log: LogLevel,
    closes_connection: bool,
}

/// Whether an error is logged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LogLevel {
    /// With its request only.
    Quiet,
    /// Even if requests are not logged.
    Warning,
}

/// Declares the kinds of [`RequestError`], a row for each: the variant, its name, the side that caused it, the status of the
/// response, its gRPC code, how the error is logged, and whether the connection closes after the response.
macro_rules! error_kinds {
    ($($variant:ident $name:literal $side:ident $status:literal $grpc:ident $log:ident $closes_connection:literal,)*) => {
        const ERROR_KINDS: &[ErrorKind] = &[$(ErrorKind {
            name: $name,
            side: Side::$side,
            status: $status,
            grpc_code: GrpcCode::$grpc,
            log: LogLevel::$log,
            closes_connection: $closes_connection,
        }),*];

        /// The positions in [`ERROR_KINDS`].
        enum Position { $($variant),* }

        impl RequestError {
            /// The kind, for metrics.
            pub fn kind_id(&self) -> ErrorKindId {
                match self {
                    $(RequestError::$variant { .. } => ErrorKindId::at(Position::$variant as usize),)*
                }
            }
        }
    };
}

error_kinds! {
    Target             "target"               Client   400 Internal          Quiet   true,
    Host               "host"                 Client   400 Internal          Quiet   true,
    Path               "path"                 Client   400 Internal          Quiet   true,
    Query              "query"                Client   400 Internal          Quiet   true,
    Framing            "framing"              Client   400 Internal          Quiet   true,
    HeadTooLarge       "head_too_large"       Client   431 Unknown           Quiet   true,
    TargetTooLong      "target_too_long"      Client   414 Unknown           Quiet   true,
    Malformed          "malformed"            Client   400 Internal          Quiet   true,
    HeadTimeout        "head_timeout"         Client   408 DeadlineExceeded  Quiet   true,
    Method             "method"               Client   405 Unknown           Quiet   true,
    Expectation        "expectation"          Client   417 Unknown           Quiet   true,
    NoRoute            "no_route"             Client   404 Unimplemented     Quiet   false,
    KeyMissing         "key_missing"          Client   400 Internal          Quiet   false,
    KeyAmbiguous       "key_ambiguous"        Client   400 Internal          Quiet   true,
    Cost               "cost"                 Client   400 Internal          Quiet   true,
    Token              "token"                Client   401 Unauthenticated   Quiet   false,
    Body               "body"                 Client   400 Internal          Quiet   true,
    BodyTimeout        "body_timeout"         Client   408 DeadlineExceeded  Quiet   true,
    BodyTooSlow        "body_too_slow"        Client   408 DeadlineExceeded  Quiet   true,
    BodyTooLarge       "body_too_large"       Client   413 ResourceExhausted Quiet   true,
    LimitExceeded      "limit_exceeded"       Client   429 ResourceExhausted Quiet   true,
    BodyAmbiguous      "body_ambiguous"       Client   400 Internal          Quiet   false,
    BodyCoding         "body_coding"          Client   415 Internal          Quiet   true,
    BodyMemory         "body_memory"          Gateway  503 Unavailable       Warning true,
    Stalled            "stalled"              Client   408 DeadlineExceeded  Quiet   true,
    Connect            "connect"              Upstream 502 Unavailable       Warning false,
    ConnectTimeout     "connect_timeout"      Upstream 504 DeadlineExceeded  Warning false,
    Upstream           "upstream"             Upstream 502 Unavailable       Warning false,
    ResponseTimeout    "response_timeout"     Upstream 504 DeadlineExceeded  Warning false,
    Panic              "panic"                Gateway  500 Internal          Warning true,
    Cleartext          "cleartext"            Client   400 Internal          Quiet   true,
    TooManyConnections "too_many_connections" Client   503 Unavailable       Quiet   true,
    RequestTimeout     "request_timeout"      Upstream 504 DeadlineExceeded  Warning false,
    Overloaded         "overloaded"           Upstream 503 Unavailable       Warning false,
    Protocol           "protocol"             Client   501 Unknown           Quiet   false,
    StoreUnavailable   "store_unavailable"    Gateway  503 Unavailable       Warning false,
    RouteField         "route_field"          Client   400 Internal          Quiet   true,
    RouteParameter     "route_parameter"      Client   400 Internal          Quiet   true,
    KeyMalformed       "key_malformed"        Client   400 Internal          Quiet   false,
    KeyUnknown         "key_unknown"          Client   401 Unauthenticated   Quiet   false,
    HeadIncomplete     "head_incomplete"      Client   499 Unknown           Quiet   true,
    StreamRefused      "stream_refused"       Client   503 Unavailable       Quiet   false,
    KeySetUnavailable  "key_set_unavailable"  Gateway  503 Unavailable       Warning false,
    OriginalRequest    "original_request"     Client   400 Internal          Quiet   true,
    CredentialsMissing "credentials_missing"  Client   401 Unauthenticated   Quiet   false,
    Denied             "denied"               Client   403 PermissionDenied  Quiet   false,
    Unreachable        "unreachable"          Upstream 503 Unavailable       Warning false,
    NoServer           "no_server"            Upstream 503 Unavailable       Warning false,
}

impl RequestError {
    /// The names of all kinds, by [`ErrorKindId`].
    pub fn kind_names() -> impl ExactSizeIterator<Item = &'static str> {
        ERROR_KINDS.iter().map(|kind| kind.name)
    }

    fn kind(&self) -> &'static ErrorKind {
        &ERROR_KINDS[self.kind_id().index()]
    }

    pub fn side(&self) -> Side {
        self.kind().side
    }

    /// The status of the response; 499 (client closed request), which is never sent, if the client has gone.
    pub fn status(&self) -> u16 {
        self.kind().status
    }

    /// The code for gRPC clients.
    pub fn grpc_code(&self) -> GrpcCode {
        self.kind().grpc_code
    }

    /// Whether the error is logged even if requests are not.
    pub fn is_logged_as_warning(&self) -> bool {
        self.kind().log == LogLevel::Warning
    }

    /// Whether the connection closes after the response, because the bytes that follow could be misread.
    pub fn closes_connection(&self) -> bool {
        self.kind().closes_connection
    }
}

impl RequestError {
    /// Whether the client broke off its body or sent a wrong one, after the request was forwarded.
    pub fn is_of_request_body(&self) -> bool {
        matches!(
            self,
            RequestError::Body
                | RequestError::BodyTimeout
                | RequestError::BodyTooSlow
                | RequestError::BodyTooLarge(_)
                | RequestError::LimitExceeded
        )
    }

    /// Whether a server may have received the request.
    pub fn may_follow_forwarding(&self) -> bool {
        let is_of_upstream = matches!(
            self,
            RequestError::Upstream(_)
                | RequestError::ResponseTimeout
                | RequestError::RequestTimeout
                | RequestError::Panic
        );
        is_of_upstream || self.is_of_request_body()
    }

    /// The message for the log, with details that the client does not get.
    pub fn operator_message(&self) -> String {
        match self {
            RequestError::Connect(cause) | RequestError::Upstream(cause) | RequestError::Unreachable { cause, .. } => {
                format!("{self}: {cause}")
            }
            RequestError::KeyMissing { rule, .. }
            | RequestError::KeyAmbiguous { rule, .. }
            | RequestError::KeyMalformed { rule, .. }
            | RequestError::Cost { rule, .. } => {
                format!("{self} (rule `{rule}`)")
            }
            RequestError::KeyUnknown(no_client) | RequestError::CredentialsMissing(no_client) => {
                format!("{self} (rule `{}`, `{}`)", no_client.rule, no_client.part)
            }
            other => other.to_string(),
        }
    }
}

/// A part of a key for a client, which does not know the words of the configuration.
fn part_in_words(part: &str) -> String {
    match part.split_once(':') {
        Some(("header", name)) => format!("the field `{name}`"),
        Some(("cookie", name)) => format!("the cookie `{name}`"),
        Some(("query", name)) => format!("the query parameter `{name}`"),
        Some(("jwt", name)) => format!("a bearer token with the claim `{name}`"),
        Some(("json", pointer)) => format!("the member `{pointer}` of a JSON body"),
        None if part == "bearer" => String::from("a bearer token"),
        None if part == "basic-user" => String::from("a user name of Basic authentication"),
        _ if part.starts_with("client-cert") => String::from("a client certificate"),
        _ => format!("`{part}`"),
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
            | RequestError::Token(message)
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
            RequestError::RouteParameter(name) => {
                write!(f, "the request gives the query parameter `{name}` more than once, or not clearly")
            }
            // Clients are known by their addresses or certificates only.
            RequestError::KeyMissing { part, .. } if part == "client" => {
                f.write_str("neither the address nor a certificate belongs to a client of this API")
            }
            RequestError::KeyMissing { part, .. } => write!(f, "the request lacks {}", part_in_words(part)),
            RequestError::KeyAmbiguous { part, .. } => {
                let part = part_in_words(part);
                write!(f, "the request gives {part} more than once, or in a form that servers read differently")
            }
            RequestError::KeyMalformed { part, .. } if part == "basic-user" => {
                f.write_str("the credentials in `authorization` are not Base64")
            }
            RequestError::KeyMalformed { part, .. } if part.starts_with("json:") => {
                write!(f, "the value at `{part}` is too long, not Unicode, or a number of another form")
            }
            RequestError::KeyMalformed { part, .. } => {
                write!(f, "`{part}` contains bytes other than printable ASCII")
            }
            RequestError::KeyUnknown(no_client) | RequestError::CredentialsMissing(no_client) => {
                f.write_str(&no_client.detail)
            }
            RequestError::Denied => f.write_str("access is denied"),
            RequestError::Cost { field, max, .. } => write!(f, "`{field}` is not one whole number from 0 to {max}"),
            RequestError::Body => f.write_str("the body of the request is incomplete or malformed"),
            RequestError::BodyTimeout => f.write_str("the body of the request took too long"),
            RequestError::BodyTooSlow => f.write_str("the body of the request arrives too slowly"),
            RequestError::BodyTooLarge(max_bytes) => {
                write!(f, "the body of the request has more than {max_bytes} bytes")
            }
            RequestError::BodyAmbiguous(why) => write!(f, "the body of the request {why}"),
            RequestError::BodyCoding => f.write_str("the content coding of the request cannot be decoded"),
            RequestError::LimitExceeded => f.write_str("the transfer was cut off: it exceeds a limit of bytes"),
            RequestError::BodyMemory => f.write_str("too many bodies are being read or decoded at the moment"),
            RequestError::Stalled => f.write_str("the client did not read the response"),
            RequestError::Connect(_) => f.write_str("no upstream server could be reached"),
            RequestError::ConnectTimeout => f.write_str("connecting to the upstream server took too long"),
            RequestError::Upstream(_) => f.write_str("the response of the upstream server is incomplete or malformed"),
            RequestError::ResponseTimeout => f.write_str("the upstream server took too long to respond"),
            RequestError::RequestTimeout => f.write_str("the request took too long"),
            RequestError::Overloaded => f.write_str("the upstream has too many requests at the moment"),
            RequestError::Unreachable { .. } => f.write_str("no upstream server can be reached at the moment"),
            RequestError::NoServer => f.write_str("the upstream has no server at the moment"),
            RequestError::StoreUnavailable => f.write_str("the limits cannot be checked at the moment"),
            RequestError::KeySetUnavailable => {
                f.write_str("the keys that verify tokens are not available at the moment")
            }
            RequestError::Panic => f.write_str("the gateway failed on this request"),
        }
    }
}

/// Why a request to the admin address failed, or a decision for a caller outside of the gateway.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ApiError {
    /// No rule has this name.
    UnknownRule(String),
    /// No client has this name.
    UnknownClient(String),
    /// The rule has no such window for the client.
    UnknownWindow {
        rule: String,
        window: String,
        known: Vec<String>,
    },
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
    /// A request without a token of `[admin]`, which it needs.
    Unauthorized,
    /// The role of the token does not include the one that is needed.
    Forbidden {
        token: String,
        role: &'static str,
        needed: &'static str,
    },
    /// The configuration has no access file.
    NoAccessFile,
    /// No deny entry has this id.
    UnknownEntry(String),
    /// The change was not made, for this reason.
    NotChanged(String),
    /// The change may have been made, for this reason.
    Unconfirmed(String),
    /// The change was not made, because the audit log cannot be written.
    AuditLogUnavailable,
    /// No configuration is served yet.
    Starting,
    /// There are no clients that could be changed.
    NoClients,
    /// The client has no key with this id.
    UnknownKey,
    /// The client has no limits of its own in this rule.
    UnknownLimits,
    /// `If-Match` or `If-None-Match` does not hold.
    PreconditionFailed,
    /// The change does not fit the current state, for this reason.
    Conflict(String),
    /// The configuration would be invalid after the change, for this reason.
    Rejected(String),
    /// The change cannot be made now, for this reason.
    Unavailable(String),
    /// As many streams of events are open as are possible.
    TooManyStreams,
    /// Another process has taken over, and has the events.
    HandedOver,
}
