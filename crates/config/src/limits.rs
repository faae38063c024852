//! Timeouts, and limits on the size and rate of requests and HTTP/2 frames: `[timeouts]`, `[drain]`, `[limits]` and
//! `[http2]`.

use std::time::Duration;

use super::settings::{
    Boolean, Custom, DAY_MS, GIB, Integer, KIB, Kind, MIB, Optional, Shape, Size, SizeOrUnlimited, Time, TimeOrZero,
};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

settings! {
    /// Timeouts of connections, requests and the process. Routes may override some of them.
    pub struct Timeouts {
        /// From the start of the connection to the end of the PROXY header, where one is required. Then the connection is
        /// closed.
        proxy_protocol: Duration = Time(5 * SECOND, 1..=DAY_MS);
        /// From the start of the connection, or from the PROXY header, to the end of the TLS handshake. Then the connection
        /// is closed.
        tls_handshake: Duration = Time(10 * SECOND, 1..=DAY_MS);
        /// From the start of the connection, or from the previous response, to the end of a request head: 408. HTTP/1.1:
        /// also the time for which an idle client connection is kept (HTTP/2: `http2.idle`).
        request_head: Duration = Time(30 * SECOND, 1..=DAY_MS);
        /// Connecting to an upstream server: 504.
        connect: Duration = Time(5 * SECOND, 1..=DAY_MS);
        /// Time without progress before the upstream's response begins: 504 if the upstream does not take or answer the
        /// request, 408 if the client does not send its body.
        response_head: Duration = Time(MINUTE, 1..=DAY_MS);
        /// Time without progress of a response, or of the rest of a request body, in either direction. Then the connection
        /// is closed, or reset if the client does not read, so that the kernel drops its buffer as well. Streams with longer
        /// silent periods need a higher value.
        body: Duration = Time(MINUTE, 1..=DAY_MS);
        /// From forwarding a request to the last byte of its response, including retries. 504 before the response head;
        /// after it the response is cut off.
        request: Option<Duration> = Optional(Time(5 * MINUTE, 1..=DAY_MS));
        /// How long an idle upstream connection is kept, plus up to five seconds. Keep it well below the server's own limit.
        upstream_idle: Duration = Time(MINUTE, 1..=DAY_MS);
        /// How long a WebSocket may be silent in both directions. A ping of either side ends the silence; data that the
        /// other side does not take does not. Then the connection is closed.
        tunnel: Duration = Time(60 * MINUTE, 1..=DAY_MS);
        /// How long requests and WebSockets may take to finish after SIGTERM, or after another process has taken over.
        drain: Duration = Time(30 * SECOND, 0..=DAY_MS);
        /// How long a new process may take to become ready. Then it is terminated, and the running process continues.
        upgrade: Duration = Time(MINUTE, 1..=DAY_MS);
    }
}

settings! {
    /// How the gateway stops.
    pub struct DrainSettings {
        /// How long the gateway still accepts connections after SIGTERM, while `/readyz` is 503 already: as long as load
        /// balancers take to notice. `timeouts.drain` begins afterwards. A second signal ends the delay. A hot upgrade has
        /// no delay.
        delay: Duration = TimeOrZero(5 * SECOND);
    }
}

settings! {
    /// Timeouts of one route, instead of those of `[timeouts]`.
    pub struct RouteTimeouts {
        /// As in `[timeouts]`.
        connect: Option<Duration> = Optional(Time(5 * SECOND, 1..=DAY_MS));
        /// As in `[timeouts]`.
        response_head: Option<Duration> = Optional(Time(MINUTE, 1..=DAY_MS));
        /// As in `[timeouts]`.
        body: Option<Duration> = Optional(Time(MINUTE, 1..=DAY_MS));
        /// As in `[timeouts]`.
        request: Option<Duration> = Optional(Time(5 * MINUTE, 1..=DAY_MS));
    }
}

impl RouteTimeouts {
    /// The timeouts of the route's requests; `general`: those of `[timeouts]`.
    pub fn over(self, general: &Timeouts) -> Timeouts {
        Timeouts {
            connect: self.connect.unwrap_or(general.connect),
            response_head: self.response_head.unwrap_or(general.response_head),
            body: self.body.unwrap_or(general.body),
            request: self.request.or(general.request),
            ..general.clone()
        }
    }
}

/// The smallest limit of a request head. Browsers send some KiB of cookies.
const REQUEST_HEAD_MIN: u64 = 8 * KIB;

settings! {
    /// Limits on the size of a request, and minimum transfer rates.
    pub struct Limits {
        /// Size of a request head, and of the trailers. Larger: 431, or 414 if the target is too long; 400 for trailers.
        /// HTTP/2: announced as SETTINGS_MAX_HEADER_LIST_SIZE; names, values and 32 bytes per field count (RFC 9113,
        /// section 6.5.2); larger: always 431, or a stream error for trailers.
        request_head: usize = Size(64 * KIB as usize, "\"64KiB\"", REQUEST_HEAD_MIN..=MIB);
        /// Fields of a request head. More: 431. HTTP/2: `:authority` counts as Host; all pieces of a Cookie count as one
        /// field, and there may be twice as many pieces as fields.
        request_fields: usize = Integer(100, 1..=1000);
        /// Size of a request body. Larger: 413. A larger `Content-Length` is refused before the request is counted or
        /// forwarded; a chunked body is cut off at the limit, and so is the request to the upstream. Bodies are streamed
        /// and take no memory: the limit protects the upstream. Routes can override it.
        max_body: Option<u64> = MAX_BODY;
        /// Lowest average rate of a request body over `rate_grace`, in bytes per second; `0`: off. Below it: 408. Time in
        /// which the upstream does not take data does not count. Routes can override it; use `0` on routes with streaming
        /// gRPC clients and clients that send data as it arises.
        min_request_rate: u64 = MIN_RATE;
        /// Interval for `min_request_rate`.
        rate_grace: Duration = Time(10 * SECOND, 1..=DAY_MS);
        /// Lowest average rate, over `timeouts.body`, at which a client reads a response that does not fit into the
        /// kernel's buffers, in bytes per second; `0`: off. Below it the connection is reset. The kernel buffers data in
        /// large pieces, so a small response is never too slow. HTTP/2: applies to a connection on which only responses are
        /// left; each stream has to take a piece within `timeouts.body`.
        min_response_rate: u64 = MIN_RATE;
    }
}

/// `max_body` of `[limits]` and of routes.
pub const MAX_BODY: SizeOrUnlimited = SizeOrUnlimited("\"10MiB\"");
/// Minimum rates of `[limits]` and of routes, bytes per second.
pub const MIN_RATE: Size<u64> = Size(240, "240", 0..=GIB);

settings! {
    /// Limits on one HTTP/2 connection of a client.
    pub struct Http2 {
        /// Accept HTTP/2 without TLS, with prior knowledge. `Upgrade: h2c` is never followed.
        h2c: bool = Boolean(true);
        /// Requests in flight. Further streams are refused (`REFUSED_STREAM`), and clients wait or retry.
        max_concurrent_streams: u32 = Integer(100, 1..=10_000);
        /// How long a connection without a request is kept, regardless of other frames. The gateway then sends GOAWAY and
        /// PING, and closes the connection when the client has answered the PING, or after five seconds.
        idle: Duration = Time(MINUTE, 1..=DAY_MS);
        /// Interval of PING to a silent client, which has 20 seconds to answer. `"0s"`: never.
        ping: Option<Duration> = Custom {
            default: Some(30 * SECOND),
            default_text: Some("\"30s\""),
            shape: || Shape::Duration(0..=DAY_MS),
            read: |item, report| {
                Time(30 * SECOND, 0..=DAY_MS).read(item, report).map(|time| (!time.is_zero()).then_some(time))
            },
        };
        /// Requests that a client may cancel in a second.
        max_resets: u32 = Integer(200, 1..=1_000_000);
        /// Frames in a second that are neither request nor body: PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty DATA, unknown
        /// types. A client may send 8 more for each stream that it opens, and one for each KiB that it receives.
        max_control_frames: u32 = Integer(1000, 1..=1_000_000);
    }
}
