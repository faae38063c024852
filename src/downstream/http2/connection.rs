//! One HTTP/2 client connection: h2's settings, the limits on the connection as a whole, keepalive, and the end.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::server::{Builder, Connection, Handshake};
use h2::{Ping, PingPong, Reason};

use crate::downstream::drain::DrainGuard;
use crate::downstream::http2::flood_guard::Budget;
use crate::downstream::http2::hpack;
use crate::downstream::http2::monitor::{ConnectionLimits, Monitor, MonitoredIo, TimeoutAction, Unfinished};
use crate::downstream::http2::stream::Streams;
use crate::io_stream::IoStream;
use crate::proxy::peer::ConnectionInfo;
use crate::proxy::request_record;
use crate::proxy::worker_state::WorkerState;
use crate::ratelimit_service::RatelimitService;
use crate::timer::Timer;
use transom_config::Config;
use transom_http::client_address::ClientAddress;
use transom_http::error::RequestError;

/// Receive windows: bytes of request bodies that may wait to be read, per stream and per connection.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;
/// Bytes of a response body that h2 buffers per stream until the client reads them.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// The limit on an encoded header block is at least this, also if `limits.request_head` is smaller: a block slightly
/// too large gets a 431 response, and is not counted as abuse.
const BLOCK_LIMIT_MIN_BYTES: usize = 64 * 1024;
/// SETTINGS_MAX_FRAME_SIZE, the default of RFC 9113.
const FRAME_MAX_BYTES: u32 = 16 * 1024;

/// Time limit for the acknowledgement of a PING.
const PONG_TIMEOUT: Duration = Duration::from_secs(20);

/// Timeouts of a connection and limits on heads.
fn limits(config: &Config) -> ConnectionLimits {
    let (timeouts, idle) = (&config.timeouts, config.http2.idle);
    let body_ms = u64::try_from(timeouts.body.as_millis()).unwrap_or(u64::MAX);
    let min_body_bytes = config.limits.min_response_rate.saturating_mul(body_ms) / 1000;
    let request = hpack::HeadLimits { fields: config.limits.request_fields, bytes: config.limits.request_head };
    ConnectionLimits { head: timeouts.request_head, idle, body: timeouts.body, min_body_bytes, request }
}

/// State of the h2 connection.
enum H2State {
    Handshaking(Handshake<MonitoredIo, Bytes>),
    Open(Connection<MonitoredIo, Bytes>, Option<Keepalive>),
}

/// A connection, its streams and its keepalive.
struct ServerConnection {
    h2: H2State,
    streams: Streams,
    monitor: Rc<Monitor>,
    /// Interval and timer of the keepalive until the handshake is complete; `None`: no keepalive.
    keepalive: Option<(Duration, Rc<Timer>)>,
    /// GOAWAY was sent, or is sent once the handshake is complete.
    is_shutting_down: bool,
    /// The client did not acknowledge a PING.
    is_peer_lost: bool,
}

impl ServerConnection {
    /// Accepts received requests, and sends the responses that are ready at once; ready when the connection ends.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            match &mut self.h2 {
                H2State::Handshaking(handshake) => {
                    let mut connection = ready!(Pin::new(handshake).poll(cx)).inspect_err(|error| {
                        if error.reason() == Some(Reason::PROTOCOL_ERROR) {
                            self.monitor.record_invalid_preface();
                        }
                    })?;
                    if self.is_shutting_down {
                        connection.graceful_shutdown();
                    }
                    let pings = self.keepalive.take().zip(connection.ping_pong());
                    let keepalive =
                        pings.map(|((every, timer), pings)| Keepalive::new(pings, &self.monitor, every, timer));
                    self.h2 = H2State::Open(connection, keepalive);
                }
                H2State::Open(connection, keepalive) => {
                    if let Some(keepalive) = keepalive
                        && keepalive.poll_peer_lost(cx).is_ready()
                    {
                        self.is_peer_lost = true;
                        connection.abrupt_shutdown(Reason::NO_ERROR);
                    }
                    let accepted = connection.poll_accept(cx);
                    self.streams.record_rejected();
                    match accepted {
                        Poll::Ready(Some(request)) => {
                            let (request, respond) = request?;
                            self.streams.accept(request, respond);
                        }
                        Poll::Ready(None) => return Poll::Ready(Ok(())),
                        Poll::Pending if self.streams.send_ready_responses() => {}
                        Poll::Pending => return Poll::Pending,
                    }
                }
            }
        }
    }

    /// Sends GOAWAY: no more requests are accepted.
    fn begin_shutdown(&mut self) {
        self.is_shutting_down = true;
        if let H2State::Open(connection, _) = &mut self.h2 {
            connection.graceful_shutdown();
        }
    }
}

/// Serves a connection until it ends. When the drain begins, it finishes the requests in flight and closes. `service`
/// answers the requests; `None`: they are forwarded.
pub async fn serve(
    io: IoStream,
    connection_info: Rc<ConnectionInfo>,
    worker: Rc<WorkerState>,
    drain_guard: DrainGuard,
    service: Option<Rc<RatelimitService>>,
) {
    let address = connection_info.address;
    let worker_config = worker.config();
    let config = &worker_config.served.config;
    let http2 = &config.http2;
    let block_bytes = config.limits.request_head.max(BLOCK_LIMIT_MIN_BYTES) as u32;
    let budget = Budget {
        resets: http2.max_resets,
        // Larger than the stream limit: a client that has not received SETTINGS yet may open more streams.
        bad_requests: http2.max_resets.max(http2.max_concurrent_streams.saturating_mul(4)),
        control: http2.max_control_frames,
        block_bytes,
    };
    let monitor = Monitor::new(&worker.timers, limits(config), budget);
    let handshake = h2_builder(config).handshake(MonitoredIo::new(io, Rc::clone(&monitor)));
    let mut serving = ServerConnection {
        h2: H2State::Handshaking(handshake),
        streams: Streams::new(Rc::clone(&worker), connection_info, Rc::clone(&monitor), service),
        monitor: Rc::clone(&monitor),
        keepalive: http2.ping.map(|every| (every, worker.timers.new_timer())),
        is_shutting_down: false,
        is_peer_lost: false,
    };
    // Do not hold the configuration for the life of the connection: a reload may replace it.
    drop(worker_config);
    let mut open_head = OpenHead {
        worker: Rc::clone(&worker),
        monitor: Rc::clone(&monitor),
        address,
        error: RequestError::HeadIncomplete,
    };
    let mut is_shutting_down = false;
    let ended = poll_fn(|cx| {
        monitor.begin_turn();
        loop {
            if let Poll::Ready(ended) = serving.poll(cx) {
                return Poll::Ready(ended);
            }
            // Checked after polling, so that a request already received is served before h2 shuts down.
            if !is_shutting_down && drain_guard.poll_begun(cx) {
                is_shutting_down = true;
            } else {
                match monitor.poll_timed_out(cx) {
                    None => return Poll::Pending,
                    Some(TimeoutAction::Shutdown) => is_shutting_down = true,
                    Some(TimeoutAction::Close(unfinished)) => {
                        match unfinished {
                            Unfinished::Head => open_head.error = RequestError::HeadTimeout,
                            Unfinished::Responses => worker.metrics.request_error(RequestError::Stalled.kind_id()),
                            Unfinished::Nothing => {}
                        }
                        return Poll::Ready(Ok(()));
                    }
                }
            }
            monitor.begin_shutdown();
            serving.begin_shutdown();
        }
    });
    if let Err(error) = ended.await {
        tracing::debug!(%address, %error, "client connection failed");
    }
    serving.streams.record_rejected();
    if let Some(abuse) = monitor.abuse() {
        worker.metrics.http2_abuse(abuse.name());
        tracing::debug!(%address, kind = abuse.name(), "client exceeded a frame limit");
    } else if monitor.is_broken() && !serving.is_peer_lost {
        // GOAWAY after a lost keepalive is no protocol error.
        worker.metrics.http2_abuse("protocol_error");
    }
}

/// Records a request whose header block never ended, however its connection ends.
struct OpenHead {
    worker: Rc<WorkerState>,
    monitor: Rc<Monitor>,
    address: ClientAddress,
    error: RequestError,
}

impl Drop for OpenHead {
    fn drop(&mut self) {
        if self.monitor.is_in_head() {
            request_record::record_rejected_head(&self.worker, self.address, &self.error, None);
        }
    }
}

/// h2's settings of a connection.
fn h2_builder(config: &Config) -> Builder {
    let streams = config.http2.max_concurrent_streams;
    let mut builder = Builder::new();
    if config.routes.iter().any(|route| route.websocket) {
        // Announces WebSockets on streams (RFC 8441, section 3).
        builder.enable_connect_protocol();
    }
    builder
        .max_concurrent_streams(streams)
        // h2 counts over the life of a connection; `flood_guard` counts per second instead.
        .max_local_error_reset_streams(None)
        // A larger head gets 431: from h2, or from the gateway through `header_scanner`.
        .max_header_list_size(config.limits.request_head as u32)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_MAX_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES);
    builder
}

/// Keepalive of a connection: sends a PING to a silent client, and reports the client as lost if it is not acknowledged
/// in time.
pub struct Keepalive {
    pings: PingPong,
    monitor: Rc<Monitor>,
    /// Silence of the client after which a PING is sent.
    interval: Duration,
    timer: Rc<Timer>,
    /// A PING was sent and not acknowledged yet.
    is_awaiting_pong: bool,
}

impl Keepalive {
    pub fn new(pings: PingPong, monitor: &Rc<Monitor>, interval: Duration, timer: Rc<Timer>) -> Keepalive {
        timer.arm(interval);
        Keepalive { pings, monitor: Rc::clone(monitor), interval, timer, is_awaiting_pong: false }
    }

    /// Ready once a PING was not acknowledged in time.
    pub fn poll_peer_lost(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.is_awaiting_pong && self.pings.poll_pong(cx).is_ready() {
                self.is_awaiting_pong = false;
                self.timer.arm(self.interval);
            }
            if !self.timer.poll_expired(cx) {
                return Poll::Pending;
            }
            if self.is_awaiting_pong {
                // Reported once.
                self.timer.disarm();
                return Poll::Ready(());
            }
            let left = self.interval.saturating_sub(self.monitor.silence());
            if left.is_zero() && self.pings.send_ping(Ping::opaque()).is_ok() {
                self.is_awaiting_pong = true;
                self.timer.arm(PONG_TIMEOUT);
            } else {
                self.timer.arm(left);
            }
        }
    }
}
