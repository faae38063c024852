//! Opens a connection to one server: DNS, TCP or Unix socket, TLS, protocol by ALPN.
//!
//! All addresses of a name are tried, each connection starting with another one: the next address as soon as one fails,
//! or in parallel while one is silent (RFC 8305, "happy eyeballs"). The first connection that succeeds is used. An address
//! also fails if its TLS handshake does: another server may have the address since the name has moved.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::sleep;
use tokio_rustls::{TlsConnector, TlsStream};

use super::dns::Resolver;
use crate::io_stream::IoStream;
use transom_config::upstream::{Scheme, Server, TransportSettings, UpstreamProtocol};
use transom_runtime::clock::Clock;

/// How long an address may be silent before the next one is tried in parallel.
const NEXT_ADDRESS_DELAY: Duration = Duration::from_millis(250);
const HTTP_2: &[u8] = b"h2";
const HTTP_1: &[u8] = b"http/1.1";

/// The protocol of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HttpVersion {
    Http1,
    Http2,
}

/// Where a connection leads, and when its address was last found in DNS.
#[derive(Clone, Copy, Debug)]
pub struct ResolvedTarget {
    /// `None` for a Unix socket.
    pub address: Option<SocketAddr>,
    /// The generation of the resolver's addresses that included this address.
    pub generation: u32,
}

/// A connected stream.
pub struct Connected {
    pub stream: IoStream,
    pub version: HttpVersion,
    /// `None` for a Unix socket.
    pub address: Option<SocketAddr>,
}

/// The addresses that have failed while a request waits for a connection.
#[derive(Default)]
pub struct FailedAddresses {
    addresses: Vec<SocketAddr>,
    /// Of the address that failed last.
    error: Option<io::Error>,
    /// The name was resolved again.
    has_looked_up: bool,
}

impl FailedAddresses {
    pub fn add(&mut self, addresses: &[SocketAddr], error: io::Error) {
        self.addresses.extend(addresses);
        self.error = Some(error);
    }
}

pub struct Connector {
    server: Server,
    protocol: UpstreamProtocol,
    pub resolver: Rc<Resolver>,
    tls: Option<Tls>,
}

struct Tls {
    name: Result<ServerName<'static>, String>,
    /// Offers the protocols that are configured for the upstream.
    configured_alpn: Arc<ClientConfig>,
    /// Offers HTTP/1.1 only.
    http1_alpn: Arc<ClientConfig>,
}

impl Connector {
    pub fn new(server: Server, transport: &TransportSettings, clock: Clock) -> Connector {
        let resolver = Resolver::new(&server.host, server.port, transport.resolve, clock);
        let tls = transport.tls.as_ref().filter(|_| server.scheme == Scheme::Https).map(|tls| {
            let protocols: &[&[u8]] = match transport.protocol {
                UpstreamProtocol::Auto => &[HTTP_2, HTTP_1],
                UpstreamProtocol::Http1 => &[HTTP_1],
                UpstreamProtocol::Http2 => &[HTTP_2],
            };
            let host = || {
                ServerName::try_from(server.host.clone())
                    .map_err(|_invalid| format!("`{}` is not a valid name for a certificate", server.host))
            };
            Tls {
                name: tls.server_name.clone().map_or_else(host, Ok),
                configured_alpn: tls.with_alpn(protocols),
                http1_alpn: tls.with_alpn(&[HTTP_1]),
            }
        });
        Connector { server, protocol: transport.protocol, resolver, tls }
    }

    /// Whether only HTTP/2 is configured.
    pub fn is_http2(&self) -> bool {
        self.protocol == UpstreamProtocol::Http2
    }

    /// Connects to an address that is not in `failed`, and adds those that fail. After all known addresses, resolves the name
    /// again, once for each `failed`: the server may have moved, and nothing was sent. `http1_only`: with HTTP/1.1, even if
    /// the server prefers HTTP/2.
    pub async fn open(&self, http1_only: bool, failed: &mut FailedAddresses) -> io::Result<Connected> {
        if self.server.scheme == Scheme::Unix {
            let stream = UnixStream::connect(&self.server.host).await?;
            return Ok(Connected {
                stream: IoStream::unix(stream),
                version: self.cleartext_version(http1_only),
                address: None,
            });
        }
        let mut addresses = self.resolver.rotated_addresses().await?;
        loop {
            addresses.retain(|address| !failed.addresses.contains(address));
            if addresses.is_empty() && !std::mem::replace(&mut failed.has_looked_up, true) {
                addresses = self.resolver.new_addresses(&failed.addresses).await;
            }
            if addresses.is_empty() {
                return Err(failed.error.take().unwrap_or_else(|| io::Error::other("the name has no address")));
            }
            match connect_to_first(&addresses).await {
                Err(error) => failed.add(&addresses, error),
                Ok((stream, address)) => match self.start(stream, address, http1_only).await {
                    Ok(connected) => return Ok(connected),
                    Err(error) => failed.add(&[address], error),
                },
            }
        }
    }

    /// Performs the TLS handshake, if configured, on a new connection.
    async fn start(&self, stream: TcpStream, address: SocketAddr, http1_only: bool) -> io::Result<Connected> {
        stream.set_nodelay(true)?;
        let address = Some(address);
        let Some(tls) = &self.tls else {
            return Ok(Connected {
                stream: IoStream::tcp(stream),
                version: self.cleartext_version(http1_only),
                address,
            });
        };
        let stream = tls.handshake(stream, http1_only).await?;
        let version = match (stream.get_ref().1.alpn_protocol(), self.protocol) {
            (Some(HTTP_2), _) if !http1_only => HttpVersion::Http2,
            (_, UpstreamProtocol::Http2) if !http1_only => {
                return Err(io::Error::other("it does not support HTTP/2: it did not select `h2` by ALPN"));
            }
            _ => HttpVersion::Http1,
        };
        Ok(Connected { stream: IoStream::tls(TlsStream::Client(stream)), version, address })
    }

    fn cleartext_version(&self, http1_only: bool) -> HttpVersion {
        if self.is_http2() && !http1_only { HttpVersion::Http2 } else { HttpVersion::Http1 }
    }
}

impl Tls {
    async fn handshake(
        &self,
        stream: TcpStream,
        http1_only: bool,
    ) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
        let config = if http1_only { &self.http1_alpn } else { &self.configured_alpn };
        let name = self.name.clone().map_err(io::Error::other)?;
        let connected = TlsConnector::from(Arc::clone(config)).connect(name, stream).await;
        connected.map_err(|error| io::Error::other(format!("TLS: {error}")))
    }
}

type ConnectAttempt<'a> = Pin<Box<dyn Future<Output = io::Result<TcpStream>> + 'a>>;

/// Connects to the first address that succeeds.
async fn connect_to_first(addresses: &[SocketAddr]) -> io::Result<(TcpStream, SocketAddr)> {
    if let [only] = addresses {
        return Ok((TcpStream::connect(only).await?, *only));
    }
    let mut remaining = addresses.iter();
    let mut attempts: Vec<(SocketAddr, ConnectAttempt<'_>)> = Vec::new();
    let mut failed = io::Error::other("the name has no address");
    let mut patience = Box::pin(sleep(Duration::ZERO));
    poll_fn(|cx| {
        loop {
            let mut at = 0;
            while at < attempts.len() {
                match attempts[at].1.as_mut().poll(cx) {
                    Poll::Ready(Ok(stream)) => return Poll::Ready(Ok((stream, attempts[at].0))),
                    Poll::Ready(Err(error)) => {
                        failed = io::Error::new(error.kind(), format!("{}: {error}", attempts[at].0));
                        drop(attempts.swap_remove(at));
                    }
                    Poll::Pending => at += 1,
                }
            }
            if !attempts.is_empty() && patience.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            match remaining.next() {
                Some(next) => {
                    attempts.push((*next, Box::pin(TcpStream::connect(*next))));
                    patience.set(sleep(NEXT_ADDRESS_DELAY));
                }
                None if attempts.is_empty() => {
                    return Poll::Ready(Err(std::mem::replace(&mut failed, io::ErrorKind::Other.into())));
                }
                None => return Poll::Pending,
            }
        }
    })
    .await
}
