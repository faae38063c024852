//! Timeouts, and limits on the size and rate of requests and HTTP/2 frames: `[timeouts]`, `[limits]` and `[http2]`.

use std::time::Duration;

/// Deadlines of connections, requests and the process. Routes may override some of them.
#[derive(Clone, PartialEq, Debug)]
pub struct Timeouts {
    /// From accepting a connection to the complete PROXY header, where one is expected.
    pub proxy_protocol: Duration,
    /// For a TLS handshake.
    pub tls_handshake: Duration,
    /// From accepting the connection, or from the previous response, to the complete head of a request.
    pub request_head: Duration,
    /// For a connection to an upstream server, with its TLS handshake.
    pub connect: Duration,
    /// From the end of the request to the head of the upstream's response.
    pub response_head: Duration,
    /// Between two pieces of a body, in either direction.
    pub body: Duration,
    /// How long an idle upstream connection stays open.
    pub upstream_idle: Duration,
    /// How long a tunnel may be silent in both directions.
    pub tunnel: Duration,
    /// How long requests in flight may take to finish once the gateway stops.
    pub drain: Duration,
    /// How long a new process may take to become ready during a hot upgrade.
    pub upgrade: Duration,
    /// From forwarding a request to the last byte of its response, all attempts together. `None`: no limit.
    pub request: Option<Duration>,
}

/// Limits on a request, and minimum transfer rates.
#[derive(Clone, PartialEq, Debug)]
pub struct Limits {
    /// Bytes of a request's head.
    pub request_head: usize,
    /// Fields of a request's head.
    pub request_fields: usize,
    /// Bytes of a request's body; `None`: no limit.
    pub max_body: Option<u64>,
    /// Bytes of a request's body that a client must send per second; 0: no minimum.
    pub min_request_rate: u64,
    /// The interval over which `min_request_rate` is measured.
    pub rate_grace: Duration,
    /// Bytes of a response that a client must accept per second, measured over [`Timeouts::body`]; 0: no minimum.
    pub min_response_rate: u64,
}

/// Limits on one HTTP/2 connection of a client.
#[derive(Clone, PartialEq, Debug)]
pub struct Http2 {
    /// Whether HTTP/2 with prior knowledge is accepted without TLS.
    pub h2c: bool,
    /// Concurrent requests.
    pub max_concurrent_streams: u32,
    /// How long a connection without a request stays open.
    pub idle: Duration,
    /// Interval of PING frames to the client; `None`: none are sent.
    pub ping: Option<Duration>,
    /// Requests that a client may cancel per second.
    pub max_resets: u32,
    /// Frames per second that carry neither a request nor a part of a body.
    pub max_control_frames: u32,
}
