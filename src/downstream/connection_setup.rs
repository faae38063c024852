//! What happens to a connection before its first request: who opened it, whether there is room for it,
//! and what is spoken on it.
//!
//! Nothing here is waited for without a limit. What is only needed by some connections is kept apart,
//! so that a plain one takes no memory for it.

use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rustls::{HandshakeKind, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsStream as EitherSide};

use super::connection_limit::ConnectionSlot;
use super::drain::DrainGuard;
use super::listener_context::Listener;
use super::protocol_detect::{Protocol, detect_protocol};
use super::proxy_protocol::{HeaderProgress, MAX_BYTES, ProxiedAddress, parse};
use super::tls::{HTTP2, fingerprint};
use crate::downstream::http1::connection::serve;
use crate::downstream::http1::io::{LINGER, LINGER_BYTES};
use crate::downstream::http2::connection;
use crate::http::error::RequestError;
use crate::http::responses;
use crate::io_stream::IoStream;
use crate::metrics::events::ConnectionRefusal;
use crate::proxy::peer::ConnectionInfo;
use crate::proxy::request_record;
use crate::proxy::worker_state::WorkerState;
use crate::timer::Timer;

/// The first byte of a TLS handshake (RFC 8446, section 5.1).
const TLS_HANDSHAKE_RECORD: u8 = 22;
/// How long a connection may still take to say what it wants once it is let go.
const DRAIN_SETUP_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a connection ends before its first request.
enum SetupError {
    /// Nothing is left to count: the refusal was counted, or the client only looked whether the port is open.
    Closed,
    Refused(ConnectionRefusal),
}

impl From<ConnectionRefusal> for SetupError {
    fn from(why: ConnectionRefusal) -> SetupError {
        SetupError::Refused(why)
    }
}

/// Takes in a connection, and serves it until it ends.
pub async fn serve_connection(
    stream: TcpStream,
    peer: IpAddr,
    place: ConnectionSlot,
    listener: Rc<Listener>,
    drain_guard: DrainGuard,
) {
    listener.meter.connected();
    match welcome(stream, peer, place, &listener, drain_guard).await {
        Ok(()) | Err(SetupError::Closed) => {}
        Err(SetupError::Refused(why)) => count_refusal(why, peer, &listener),
    }
    listener.meter.disconnected();
}

/// Says no to a connection for which there is no place, without taking it in.
pub fn refuse(stream: TcpStream, peer: IpAddr, listener: &Listener) {
    count_refusal(ConnectionRefusal::MaxConnections, peer, listener);
    respond_too_many_connections(stream, peer, listener);
}

fn count_refusal(why: ConnectionRefusal, peer: IpAddr, listener: &Listener) {
    tracing::debug!(%peer, ?why, "a connection was turned away");
    listener.meter.refused(why);
}

/// Answers a connection for which there is no place, where that needs no TLS handshake first.
fn respond_too_many_connections(stream: TcpStream, address: IpAddr, listener: &Listener) {
    if !listener.is_tls() {
        request_record::record_rejected_head(
            &listener.listener_context.worker,
            address,
            &RequestError::TooManyConnections,
        );
        IoStream::tcp(stream).try_send(&responses::written(&responses::fault(&RequestError::TooManyConnections)));
    }
}

async fn welcome(
    mut stream: TcpStream,
    peer: IpAddr,
    mut place: ConnectionSlot,
    listener: &Listener,
    drain_guard: DrainGuard,
) -> Result<(), SetupError> {
    let worker = Rc::clone(&listener.listener_context.worker);
    let address = if listener.listener_context.expects_proxy_header(peer) {
        let limit = worker.config().compiled.config.timeouts.proxy_protocol;
        let timer = worker.timers.new_timer();
        let source = Box::pin(with_timeout(&timer, limit, &drain_guard, read_proxy_header(&mut stream))).await;
        match source.ok_or(ConnectionRefusal::ProxyHeaderTimeout)?? {
            ProxiedAddress::Client(address) => address,
            ProxiedAddress::Proxy => peer,
        }
    } else {
        peer
    };
    if !place.acquire_for_client(address) {
        // Counted before the answer: a client that has read it finds it in the metrics.
        count_refusal(ConnectionRefusal::MaxConnectionsPerClient, address, listener);
        respond_too_many_connections(stream, address, listener);
        return Err(SetupError::Closed);
    }
    let (wire, origin) = match listener.tls_config() {
        None => (IoStream::tcp(stream), ConnectionInfo::new(address, false)),
        Some(tls) => Box::pin(accept_tls(stream, tls, address, listener, &drain_guard)).await?,
    };
    let origin = Rc::new(origin);
    let (wire, spoken) = match origin.is_secure {
        // Where a client names nothing, it speaks HTTP/1.1.
        true if wire.alpn() == Some(HTTP2) => (wire, Protocol::Http2),
        false if worker.config().compiled.config.http2.h2c => {
            match detect_protocol(wire, &worker, &drain_guard).await {
                Some(found) => found,
                None => return Ok(()),
            }
        }
        true | false => (wire, Protocol::Http1),
    };
    match spoken {
        Protocol::Http1 => serve(wire, origin, worker, drain_guard).await,
        // Apart, so that the others take no memory for it.
        Protocol::Http2 => Box::pin(connection::serve(wire, origin, worker, drain_guard)).await,
    }
    Ok(())
}

/// Leads a connection through TLS, and notes whose it is.
async fn accept_tls(
    stream: TcpStream,
    tls: Arc<ServerConfig>,
    address: IpAddr,
    listener: &Listener,
    drain_guard: &DrainGuard,
) -> Result<(IoStream, ConnectionInfo), SetupError> {
    let worker = &listener.listener_context.worker;
    let limit = worker.config().compiled.config.timeouts.tls_handshake;
    let timer = worker.timers.new_timer();
    let shaken = with_timeout(&timer, limit, drain_guard, handshake(stream, tls, address, worker)).await;
    let stream = shaken.ok_or(ConnectionRefusal::HandshakeTimeout)??;
    let (_, session) = stream.get_ref();
    listener.meter.handshake(session.handshake_kind() == Some(HandshakeKind::Resumed));
    let certificate = session.peer_certificates().and_then(<[_]>::first).map(fingerprint);
    let origin = ConnectionInfo::new(address, true).with_certificate(certificate);
    Ok((IoStream::tls(EitherSide::from(stream)), origin))
}

/// The TLS handshake. Whoever speaks HTTP in the clear is told so.
async fn handshake(
    stream: TcpStream,
    tls: Arc<ServerConfig>,
    address: IpAddr,
    worker: &WorkerState,
) -> Result<TlsStream<TcpStream>, SetupError> {
    let mut first = [0];
    // Looked at, not taken: to what it does not know, rustls answers with an alert.
    match stream.peek(&mut first).await {
        Ok(1..) if first[0] == TLS_HANDSHAKE_RECORD || !first[0].is_ascii_alphabetic() => {}
        Ok(1..) => {
            request_record::record_rejected_head(worker, address, &RequestError::Cleartext);
            respond_cleartext(stream, &RequestError::Cleartext).await;
            return Err(ConnectionRefusal::Cleartext.into());
        }
        Ok(0) | Err(_) => return Err(SetupError::Closed),
    }
    TlsAcceptor::from(tls).accept(stream).await.map_err(|error| {
        tracing::debug!(%address, %error, "a TLS handshake failed");
        ConnectionRefusal::Handshake.into()
    })
}

/// Answers in the clear, and closes in a way that lets the answer arrive: what still comes is read and
/// thrown away for a moment.
async fn respond_cleartext(mut stream: TcpStream, fault: &RequestError) {
    let parting = async {
        stream.write_all(&responses::written(&responses::fault(fault))).await?;
        stream.shutdown().await?;
        let mut rest = (&mut stream).take(LINGER_BYTES as u64);
        tokio::io::copy(&mut rest, &mut tokio::io::sink()).await
    };
    // A client that does not wait for its answer needs none.
    let _ = tokio::time::timeout(LINGER, parting).await;
}

/// Reads a PROXY header, and nothing of what comes behind it.
async fn read_proxy_header(stream: &mut TcpStream) -> Result<ProxiedAddress, SetupError> {
    let mut seen = Vec::new();
    let mut peeked = vec![0; MAX_BYTES];
    loop {
        let taken = seen.len();
        match stream.peek(&mut peeked).await {
            // Balancers look whether a port is open.
            Ok(0) if taken == 0 => return Err(SetupError::Closed),
            Ok(0) | Err(_) => return Err(ConnectionRefusal::ProxyHeader.into()),
            Ok(count) => seen.extend_from_slice(&peeked[..count]),
        }
        let (length, source) = match parse(&seen) {
            HeaderProgress::Incomplete => (seen.len(), None),
            HeaderProgress::Complete { length, source } => (length, Some(source)),
            HeaderProgress::Malformed => return Err(ConnectionRefusal::ProxyHeader.into()),
        };
        // These bytes are there, so nothing is waited for. What was seen of the header before is taken already.
        seen.truncate(length);
        stream.read_exact(&mut seen[taken..]).await.map_err(|_gone| ConnectionRefusal::ProxyHeader)?;
        if let Some(source) = source {
            return Ok(source);
        }
    }
}

/// Waits for something no longer than for so long, and not much longer once the connection is let go.
async fn with_timeout<T>(
    timer: &Timer,
    limit: Duration,
    drain_guard: &DrainGuard,
    waited_for: impl Future<Output = T>,
) -> Option<T> {
    timer.arm(limit);
    let mut waited_for = pin!(waited_for);
    let mut told = false;
    poll_fn(|cx| {
        if let Poll::Ready(done) = waited_for.as_mut().poll(cx) {
            return Poll::Ready(Some(done));
        }
        if !told && drain_guard.poll_closing_idle(cx) {
            told = true;
            timer.arm(limit.min(DRAIN_SETUP_TIMEOUT));
        }
        if timer.poll_expired(cx) { Poll::Ready(None) } else { Poll::Pending }
    })
    .await
}
