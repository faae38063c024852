//! Setup of a connection before its first request: PROXY header, limit per client, TLS handshake, protocol detection.
//!
//! Every wait has a time limit. Steps that only some connections need are boxed, so that a plain connection uses no
//! memory for them.

use std::fmt::Display;
use std::future::poll_fn;
use std::io::{self, Read};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use rustls::{HandshakeKind, ServerConfig};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsStream as EitherSide};

use super::connection_limit::ConnectionSlot;
use super::drain::{Drain, DrainGuard};
use super::listener_context::Listener;
use super::protocol_detect::{Protocol, detect_protocol};
use super::proxy_protocol::{HeaderProgress, MAX_BYTES, ProxiedAddress, parse};
use super::tls::HTTP2;
use crate::acme::live_certificate::ACME_TLS;
use crate::downstream::linger::{LINGER, linger};
use crate::downstream::{http1, http2};
use crate::io_stream::{IoStream, StreamSocket};
use crate::proxy::peer::ConnectionInfo;
use crate::proxy::request_record;
use crate::timer::Timer;
use transom_http::client_address::ClientAddress;
use transom_http::error::RequestError;
use transom_rules::responses;
use transom_runtime::metrics::events::ConnectionRefusal;

/// The first byte of a TLS handshake (RFC 8446, section 5.1).
const TLS_HANDSHAKE_RECORD: u8 = 22;
/// The beginning of a request whose response has no body.
const HEAD: &[u8; 5] = b"HEAD ";
/// Time limit of a setup step once the drain closes idle connections.
const DRAIN_SETUP_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a connection ends before its first request.
enum SetupError {
    /// Nothing is left to count: the refusal was counted, or the client closed the connection or sent nothing.
    Closed,
    Refused(ConnectionRefusal),
}

impl From<ConnectionRefusal> for SetupError {
    fn from(refusal: ConnectionRefusal) -> SetupError {
        SetupError::Refused(refusal)
    }
}

/// Sets up a connection and serves it until it ends. The connection holds `slot` for as long.
pub async fn serve_connection(
    stream: StreamSocket,
    peer: ClientAddress,
    mut slot: ConnectionSlot,
    listener: Rc<Listener>,
    drain_guard: DrainGuard,
) {
    listener.metrics.connected();
    match set_up(stream, peer, &mut slot, &listener, &drain_guard).await {
        Ok((io, connection, protocol)) => {
            let worker = Rc::clone(&listener.listener_context.worker);
            let connection = Rc::new(connection);
            match protocol {
                Protocol::Http1 => http1::connection::serve(io, connection, worker, drain_guard).await,
                // Boxed, so that HTTP/1.1 connections use no memory for it.
                Protocol::Http2 => {
                    let service = listener.ratelimit_service().cloned();
                    Box::pin(http2::connection::serve(io, connection, worker, drain_guard, service)).await;
                }
            }
        }
        Err(SetupError::Closed) => {}
        Err(SetupError::Refused(refusal)) => count_refusal(refusal, peer, &listener),
    }
    listener.metrics.disconnected();
}

/// Refuses a connection beyond `max_connections`.
pub fn refuse(stream: StreamSocket, peer: ClientAddress, listener: &Listener) {
    count_refusal(ConnectionRefusal::MaxConnections, peer, listener);
    respond_too_many_connections(stream, peer, listener);
}

/// Called before a response is written: a client that has read the response finds the refusal in the metrics.
fn count_refusal(refusal: ConnectionRefusal, peer: ClientAddress, listener: &Listener) {
    tracing::debug!(%peer, reason = ?refusal, "connection refused");
    let message = match refusal {
        ConnectionRefusal::ProxyHeader => {
            "the connection of a peer in `proxy_protocol` does not begin with a PROXY header"
        }
        ConnectionRefusal::ProxyHeaderTimeout => {
            "the PROXY header of a peer in `proxy_protocol` did not arrive in time"
        }
        ConnectionRefusal::HandshakeTimeout => "a TLS handshake took longer than `timeouts.tls_handshake`",
        // The first is logged with its error, the others would be too many.
        ConnectionRefusal::Handshake
        | ConnectionRefusal::Cleartext
        | ConnectionRefusal::MaxConnections
        | ConnectionRefusal::MaxConnectionsPerClient => "",
    };
    if !message.is_empty() {
        log_failed_setup(message, &"", peer, listener);
    }
    listener.metrics.refused(refusal);
}

/// Logs the first of several failures of a kind, with its peer.
fn log_failed_setup(message: &'static str, error: &dyn Display, peer: ClientAddress, listener: &Listener) {
    let worker = &listener.listener_context.worker;
    if let Some(suppressed) = worker.log_throttle.allow(message, worker.clock.instant()) {
        tracing::info!(%peer, suppressed, "{message}{error}");
    }
}

/// Sends 503 to a refused connection. A TLS connection is closed without a response: one would need a handshake first.
fn respond_too_many_connections(stream: StreamSocket, address: ClientAddress, listener: &Listener) {
    if !listener.is_tls() {
        let response = setup_error_response(RequestError::TooManyConnections, &stream, address, listener);
        IoStream::clear(stream).counted(&listener.metrics.bytes).try_send(&response);
    }
}

/// Records an error before the first request, and writes its response. The bytes that have arrived are taken off the socket,
/// which closes without a reset then. If they do not begin with the method, the response has no content, because it may be to HEAD.
fn setup_error_response(
    error: RequestError,
    stream: &StreamSocket,
    address: ClientAddress,
    listener: &Listener,
) -> Bytes {
    let worker = &listener.listener_context.worker;
    request_record::record_rejected_head(worker, address, &error, None);
    let mut beginning = [0; 1024];
    // Without the runtime, which does not know yet that a new socket is readable.
    let length = (&*SockRef::from(stream)).read(&mut beginning).unwrap_or(0);
    let mut response = responses::error_response(&error);
    let has_proxy_header = beginning.starts_with(b"PROXY ") || beginning.starts_with(b"\r\n\r\n\0");
    if length < HEAD.len() || has_proxy_header {
        response.headers_mut().remove(CONTENT_TYPE);
        response.body_mut().clear();
    }
    responses::http1_bytes(&response, beginning.starts_with(HEAD), &worker.date())
}

/// Makes a connection ready for its first request.
async fn set_up(
    mut stream: StreamSocket,
    peer: ClientAddress,
    slot: &mut ConnectionSlot,
    listener: &Listener,
    drain_guard: &DrainGuard,
) -> Result<(IoStream, ConnectionInfo, Protocol), SetupError> {
    let worker = &listener.listener_context.worker;
    let address = if listener.listener_context.expects_proxy_header(peer) {
        let timeout = worker.config().served.config.timeouts.proxy_protocol;
        let timer = worker.timers.new_timer();
        let source = Box::pin(with_timeout(&timer, timeout, drain_guard, read_proxy_header(&mut stream))).await;
        match source.ok_or(ConnectionRefusal::ProxyHeaderTimeout)?? {
            ProxiedAddress::Client(address) => address.into(),
            ProxiedAddress::Proxy => peer,
        }
    } else {
        peer
    };
    // A proxy that asks about requests is no client.
    if !listener.is_forward_auth() && !slot.acquire_for_client(address) {
        count_refusal(ConnectionRefusal::MaxConnectionsPerClient, address, listener);
        respond_too_many_connections(stream, address, listener);
        return Err(SetupError::Closed);
    }
    let (io, connection) = match listener.tls_config() {
        None => {
            (IoStream::clear(stream), ConnectionInfo::new(address, false).with_forward_auth(listener.is_forward_auth()))
        }
        Some(tls) => Box::pin(accept_tls(stream, tls, address, listener, drain_guard)).await?,
    };
    let io = io.counted(&listener.metrics.bytes);
    let (io, protocol) = match connection.is_secure {
        _ if listener.ratelimit_service().is_some() => (io, Protocol::Http2),
        _ if connection.is_forward_auth => (io, Protocol::Http1),
        // A client that negotiates no protocol speaks HTTP/1.1.
        true if io.alpn() == Some(HTTP2) => (io, Protocol::Http2),
        // The handshake was the answer to a challenge (RFC 8737, section 3).
        true if io.alpn() == Some(ACME_TLS) => return Err(SetupError::Closed),
        false if worker.config().served.config.http2.h2c => {
            detect_protocol(io, worker, drain_guard).await.ok_or(SetupError::Closed)?
        }
        true | false => (io, Protocol::Http1),
    };
    Ok((io, connection, protocol))
}

/// Performs the TLS handshake.
async fn accept_tls(
    stream: StreamSocket,
    tls: Arc<ServerConfig>,
    address: ClientAddress,
    listener: &Listener,
    drain_guard: &DrainGuard,
) -> Result<(IoStream, ConnectionInfo), SetupError> {
    let worker = &listener.listener_context.worker;
    let timeout = worker.config().served.config.timeouts.tls_handshake;
    let timer = worker.timers.new_timer();
    let stream =
        with_timeout(&timer, timeout, drain_guard, handshake(stream, tls, address, listener, drain_guard.drain()))
            .await;
    let stream = stream.ok_or(ConnectionRefusal::HandshakeTimeout)??;
    let (_, session) = stream.get_ref();
    listener.metrics.handshake(session.handshake_kind() == Some(HandshakeKind::Resumed));
    let connection = ConnectionInfo::of_tls(address, session);
    Ok((IoStream::tls(EitherSide::from(stream)), connection))
}

/// The TLS handshake. A client that sends HTTP without TLS gets an error response in clear text.
async fn handshake(
    stream: StreamSocket,
    tls: Arc<ServerConfig>,
    address: ClientAddress,
    listener: &Listener,
    drain: &Drain,
) -> Result<TlsStream<StreamSocket>, SetupError> {
    let mut first = [0];
    // Peeked, because rustls has to read these bytes: it sends an alert for a record it does not know.
    match stream.peek(&mut first).await {
        Ok(1..) if first[0] == TLS_HANDSHAKE_RECORD || !first[0].is_ascii_alphabetic() => {}
        Ok(1..) => {
            count_refusal(ConnectionRefusal::Cleartext, address, listener);
            let response = setup_error_response(RequestError::Cleartext, &stream, address, listener);
            respond_and_close(IoStream::clear(stream).counted(&listener.metrics.bytes), &response, drain).await;
            return Err(SetupError::Closed);
        }
        Ok(0) | Err(_) => return Err(SetupError::Closed),
    }
    TlsAcceptor::from(tls).accept(stream).await.map_err(|error| {
        tracing::debug!(%address, %error, "TLS handshake failed");
        log_failed_setup("a TLS handshake failed: ", &error, address, listener);
        ConnectionRefusal::Handshake.into()
    })
}

/// Sends a response in clear text. Bytes that the client still sends are read and discarded for a moment: closing
/// the socket with unread bytes would reset the connection, and the client could lose the response.
async fn respond_and_close(mut stream: IoStream, response: &[u8], drain: &Drain) {
    let closing = async {
        stream.write_all(response).await?;
        stream.shutdown().await?;
        linger(&mut stream, drain).await;
        io::Result::Ok(())
    };
    // An error means that the client has closed the connection and does not read the response.
    let _ = tokio::time::timeout(LINGER, closing).await;
}

/// Reads a PROXY header, and no byte behind it.
async fn read_proxy_header(stream: &mut StreamSocket) -> Result<ProxiedAddress, SetupError> {
    let mut seen = Vec::new();
    let mut peeked = vec![0; MAX_BYTES];
    loop {
        let taken = seen.len();
        match stream.peek(&mut peeked).await {
            // Load balancers open and close a connection to check that the port is open.
            Ok(0) if taken == 0 => return Err(SetupError::Closed),
            Ok(0) | Err(_) => return Err(ConnectionRefusal::ProxyHeader.into()),
            Ok(count) => seen.extend_from_slice(&peeked[..count]),
        }
        let (length, source) = match parse(&seen) {
            HeaderProgress::Incomplete => (seen.len(), None),
            HeaderProgress::Complete { length, source } => (length, Some(source)),
            HeaderProgress::Malformed => return Err(ConnectionRefusal::ProxyHeader.into()),
        };
        // Takes the peeked bytes of the header off the socket; they are there, so `read_exact` does not wait.
        seen.truncate(length);
        stream.read_exact(&mut seen[taken..]).await.map_err(|_closed| ConnectionRefusal::ProxyHeader)?;
        if let Some(source) = source {
            return Ok(source);
        }
    }
}

/// Runs a future for at most `limit`, and for at most `DRAIN_SETUP_TIMEOUT` more once the drain closes idle connections.
/// `None`: the time is up.
async fn with_timeout<T>(
    timer: &Timer,
    limit: Duration,
    drain_guard: &DrainGuard,
    future: impl Future<Output = T>,
) -> Option<T> {
    timer.arm(limit);
    let mut future = pin!(future);
    let mut is_shortened = false;
    poll_fn(|cx| {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        if !is_shortened && drain_guard.poll_closing_idle(cx) {
            is_shortened = true;
            timer.arm(limit.min(DRAIN_SETUP_TIMEOUT));
        }
        if timer.poll_expired(cx) { Poll::Ready(None) } else { Poll::Pending }
    })
    .await
}
