//! One client connection that speaks HTTP/2: hyper's settings, the limits on the connection as a whole,
//! and its end.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};

use super::conduct::Budget;
use super::drain::Guest;
use super::session::{Late, Limits, Session, Watched};
use super::stream::Streams;
use crate::config::Config;
use crate::gateway::hall::{Hall, Origin};
use crate::gateway::record;
use crate::http::fault::Fault;
use crate::wire::Wire;

/// What is read of a body before the one who wants it takes it; of one stream, and of all.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;
/// What is kept of an answer until the client takes it.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Of a request's head, as RFC 9113, section 6.5.2 counts: 32 bytes a field more than it has.
const HEAD_MAX_BYTES: u32 = 64 * 1024;
/// How long the answer to a PING may take.
const PONG: Duration = Duration::from_secs(20);

/// How long things may take on a connection.
fn limits(config: &Config) -> Limits {
    let (timeouts, idle) = (&config.timeouts, config.http2.idle);
    let body_ms = u64::try_from(timeouts.body.as_millis()).unwrap_or(u64::MAX);
    let least = config.limits.min_response_rate.saturating_mul(body_ms) / 1000;
    Limits { head: timeouts.request_head, idle, body: timeouts.body, least }
}

/// Serves a connection until it ends. Told to drain, it finishes what is under way and closes.
pub async fn serve(wire: Wire, origin: Rc<Origin>, hall: Rc<Hall>, guest: Guest) {
    let address = origin.address;
    let view = hall.view();
    let config = &view.snapshot.config;
    let http2 = &config.http2;
    let budget = Budget { resets: http2.max_resets, control: http2.max_control_frames };
    let session = Session::new(&hall.timers, limits(config), budget);
    let (streams, at_hand) = Streams::new(Rc::clone(&hall), origin, Rc::clone(&session));
    let mut builder = http2::Builder::new(streams.clone());
    if config.routes.iter().any(|route| route.websocket) {
        // Clients are told that they may open WebSockets on streams (RFC 8441, section 3).
        builder.enable_connect_protocol();
    }
    let connection = builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(http2.max_concurrent_streams)
        // Streams that are refused because there are too many count as well.
        .max_local_error_reset_streams(http2.max_concurrent_streams as usize * 4)
        .max_header_list_size(HEAD_MAX_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .keep_alive_interval(http2.ping)
        .keep_alive_timeout(PONG)
        .serve_connection(TokioIo::new(Watched::new(wire, Rc::clone(&session))), streams);
    // The configuration may change while the connection lasts.
    drop(view);
    let mut connection = std::pin::pin!(connection);
    let mut told = false;
    let ended = poll_fn(|cx| {
        loop {
            if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
                return Poll::Ready(ended);
            }
            if at_hand.hand_over() {
                continue;
            }
            // Polled first: a request that has already come is answered before hyper is told to close.
            if !told && guest.poll_begun(cx) {
                told = true;
            } else {
                match session.poll_late(cx) {
                    None => return Poll::Pending,
                    Some(Late::Leave) => told = true,
                    Some(Late::Close { in_head }) => {
                        if in_head {
                            record::refused_head(&hall, address, &Fault::HeadTimeout);
                        }
                        return Poll::Ready(Ok(()));
                    }
                }
            }
            session.is_ending();
            connection.as_mut().graceful_shutdown();
        }
    });
    let mut is_silent = false;
    if let Err(error) = ended.await {
        // The client did not answer a PING; hyper says farewell to it all the same.
        is_silent = error.is_timeout();
        tracing::debug!(%address, %error, "a client connection broke off");
    }
    if let Some(abuse) = session.abuse() {
        hall.meter.http2_abuse(abuse.name());
        tracing::debug!(%address, kind = abuse.name(), "a client sent more than it may");
    } else if session.is_broken() && !is_silent {
        hall.meter.http2_abuse("protocol_error");
    }
}
