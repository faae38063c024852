//! One client connection that speaks HTTP/2: h2's settings, the limits on the connection as a whole,
//! and its end.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use h2::server::{Builder, Connection, Handshake};

use crate::config::Config;
use crate::downstream::drain::DrainGuard;
use crate::downstream::http2::flood_guard::Budget;
use crate::downstream::http2::hpack;
use crate::downstream::http2::keepalive::Keepalive;
use crate::downstream::http2::monitor::{Limits, Monitor, MonitoredIo, TimeoutAction};
use crate::downstream::http2::stream::Streams;
use crate::http::error::RequestError;
use crate::io_stream::IoStream;
use crate::proxy::peer::ConnectionInfo;
use crate::proxy::request_record;
use crate::proxy::worker_state::WorkerState;
use crate::timer::Timer;

/// What is read of a body before the one who wants it takes it; of one stream, and of all.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;
/// What is kept of an answer until the client takes it.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// What a header block may have on its way, where its fields may have less: enough for their names and values to be told too large.
const BLOCK_BYTES: usize = 64 * 1024;
/// Of a frame's payload, as most peers have it.
const FRAME_MAX_BYTES: u32 = 16 * 1024;

/// How long things may take on a connection, and how large heads may be.
fn limits(config: &Config) -> Limits {
    let (timeouts, idle) = (&config.timeouts, config.http2.idle);
    let body_ms = u64::try_from(timeouts.body.as_millis()).unwrap_or(u64::MAX);
    let least = config.limits.min_response_rate.saturating_mul(body_ms) / 1000;
    let request = hpack::Limits { fields: config.limits.request_fields, bytes: config.limits.request_head };
    Limits { head: timeouts.request_head, idle, body: timeouts.body, min_body_bytes: least, request }
}

/// A connection that speaks, or is about to.
enum H2State {
    Handshaking(Handshake<MonitoredIo, Bytes>),
    Open(Connection<MonitoredIo, Bytes>, Option<Keepalive>),
}

/// A connection and all that happens on it.
struct ServerConnection {
    h2: H2State,
    streams: Streams,
    monitor: Rc<Monitor>,
    /// What asks a client that says nothing whether it is there; `None` where nothing does.
    keepalive: Option<(Duration, Rc<Timer>)>,
    /// The client has been told that the connection ends, or will be when it is open.
    is_shutting_down: bool,
    /// The client did not answer a PING.
    is_peer_lost: bool,
}

impl ServerConnection {
    /// Takes what requests there are, and answers those that can be answered at once; ready at the connection's end.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            match &mut self.h2 {
                H2State::Handshaking(handshake) => {
                    let mut connection = ready!(Pin::new(handshake).poll(cx))?;
                    if self.is_shutting_down {
                        connection.graceful_shutdown();
                    }
                    let pings = self.keepalive.take().zip(connection.ping_pong());
                    let pulse = pings.map(|((every, timer), pings)| Keepalive::new(pings, &self.monitor, every, timer));
                    self.h2 = H2State::Open(connection, pulse);
                }
                H2State::Open(connection, pulse) => {
                    if let Some(pulse) = pulse
                        && pulse.poll_peer_lost(cx).is_ready()
                    {
                        self.is_peer_lost = true;
                        connection.abrupt_shutdown(Reason::NO_ERROR);
                    }
                    let accepted = connection.poll_accept(cx);
                    self.streams.record_rejected_by_h2();
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

    /// Tells the client that no more requests are taken.
    fn begin_shutdown(&mut self) {
        self.is_shutting_down = true;
        if let H2State::Open(connection, _) = &mut self.h2 {
            connection.graceful_shutdown();
        }
    }
}

/// Serves a connection until it ends. Told to drain, it finishes what is under way and closes.
pub async fn serve(wire: IoStream, origin: Rc<ConnectionInfo>, worker: Rc<WorkerState>, drain_guard: DrainGuard) {
    let address = origin.address;
    let view = worker.config();
    let config = &view.compiled.config;
    let http2 = &config.http2;
    let block_bytes = config.limits.request_head.max(BLOCK_BYTES) as u32;
    let budget = Budget {
        resets: http2.max_resets,
        // A client that does not know the limit yet may open more streams than it allows.
        bad_requests: http2.max_resets.max(http2.max_concurrent_streams.saturating_mul(4)),
        control: http2.max_control_frames,
        block_bytes,
    };
    let session = Monitor::new(&worker.timers, limits(config), budget);
    let handshake = h2_builder(config).handshake(MonitoredIo::new(wire, Rc::clone(&session)));
    let mut serving = ServerConnection {
        h2: H2State::Handshaking(handshake),
        streams: Streams::new(Rc::clone(&worker), origin, Rc::clone(&session)),
        monitor: Rc::clone(&session),
        keepalive: http2.ping.map(|every| (every, worker.timers.new_timer())),
        is_shutting_down: false,
        is_peer_lost: false,
    };
    // The configuration may change while the connection lasts.
    drop(view);
    let mut told = false;
    let ended = poll_fn(|cx| {
        session.begin_turn();
        loop {
            if let Poll::Ready(ended) = serving.poll(cx) {
                return Poll::Ready(ended);
            }
            // Polled first: a request that has already come is answered before h2 is told to close.
            if !told && drain_guard.poll_begun(cx) {
                told = true;
            } else {
                match session.poll_timed_out(cx) {
                    None => return Poll::Pending,
                    Some(TimeoutAction::Shutdown) => told = true,
                    Some(TimeoutAction::Close { in_head }) => {
                        if in_head {
                            request_record::record_rejected_head(&worker, address, &RequestError::HeadTimeout);
                        }
                        return Poll::Ready(Ok(()));
                    }
                }
            }
            session.begin_shutdown();
            serving.begin_shutdown();
        }
    });
    if let Err(error) = ended.await {
        tracing::debug!(%address, %error, "a client connection broke off");
    }
    if let Some(abuse) = session.abuse() {
        worker.metrics.http2_abuse(abuse.name());
        tracing::debug!(%address, kind = abuse.name(), "a client sent more than it may");
    } else if session.is_broken() && !serving.is_peer_lost {
        // h2 says farewell to one that does not answer a PING all the same.
        worker.metrics.http2_abuse("protocol_error");
    }
}

/// What h2 is told of a connection.
fn h2_builder(config: &Config) -> Builder {
    let streams = config.http2.max_concurrent_streams;
    let mut builder = Builder::new();
    if config.routes.iter().any(|route| route.websocket) {
        // Clients are told that they may open WebSockets on streams (RFC 8441, section 3).
        builder.enable_connect_protocol();
    }
    builder
        .max_concurrent_streams(streams)
        // h2 counts over the life of a connection, `conduct` by the second.
        .max_local_error_reset_streams(None)
        // `hpack` answers these with 431.
        .max_header_list_size(config.limits.request_head as u32)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_MAX_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES);
    builder
}
