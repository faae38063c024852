//! Opens a connection to one server: DNS, TCP or Unix socket, PROXY header, TLS, protocol by ALPN.
//!
//! All addresses of a name are tried, each connection starting with another one: the next address as soon as one fails,
//! or in parallel while one is silent (RFC 8305, "happy eyeballs"). The first connection that succeeds is used. An address
//! also fails if its TLS handshake does: another server may have the address since the name has moved.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::sleep;
use tokio_rustls::{TlsConnector, TlsStream};

use super::dns::Resolver;
use super::proxy_header::proxy_header;
use crate::io_stream::{IoStream, StreamSocket};
use transom_config::upstream::{ProxyVersion, Scheme, Server, TransportSettings, UpstreamProtocol};
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
    pub target: ResolvedTarget,
}

pub struct Connector {
    server: Server,
    protocol: UpstreamProtocol,
    proxy_protocol: Option<ProxyVersion>,
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
        let dns_servers = transport.dns_servers.clone();
        let resolver = Resolver::new(&server.host, server.port, transport.resolve, dns_servers, clock);
        let tls = transport.tls.as_ref().filter(|_| server.scheme == Scheme::Https).map(|tls| {
            let protocols: &[&[u8]] = match transport.protocol {
                // The requests of several clients would share a connection.
                UpstreamProtocol::Auto if transport.proxy_protocol.is_some() => &[HTTP_1],
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
        let TransportSettings { protocol, proxy_protocol, .. } = *transport;
        Connector { server, protocol, proxy_protocol, resolver, tls }
    }

    /// Whether only HTTP/2 is configured.
    pub fn is_http2(&self) -> bool {
        self.protocol == UpstreamProtocol::Http2
    }

    /// Whether a connection can serve requests of several clients.
    pub fn is_for_all_clients(&self) -> bool {
        self.proxy_protocol.is_none()
    }

    /// `http1_only`: connects with HTTP/1.1, even if the server prefers HTTP/2. `client`: for a PROXY header.
    pub fn dial(&self, http1_only: bool, client: Option<IpAddr>) -> Dial<'_> {
        Dial { connector: self, http1_only, client, failed: Vec::new(), error: None, has_looked_up: false }
    }

    /// Sends the PROXY header, if configured.
    async fn send_proxy_header(
        &self,
        stream: &mut (impl AsyncWrite + Unpin),
        client: Option<IpAddr>,
        server: Option<SocketAddr>,
    ) -> io::Result<()> {
        match self.proxy_protocol {
            Some(version) => stream.write_all(&proxy_header(version, client, server)).await,
            None => Ok(()),
        }
    }

    /// Performs the TLS handshake, if configured, on a new connection.
    async fn start(
        &self,
        mut stream: TcpStream,
        address: SocketAddr,
        http1_only: bool,
        client: Option<IpAddr>,
    ) -> io::Result<(IoStream, HttpVersion)> {
        stream.set_nodelay(true)?;
        self.send_proxy_header(&mut stream, client, Some(address)).await?;
        let Some(tls) = &self.tls else { return Ok((IoStream::tcp(stream), self.cleartext_version(http1_only))) };
        let stream = tls.handshake(StreamSocket::Tcp(stream), http1_only).await?;
        let version = match (stream.get_ref().1.alpn_protocol(), self.protocol) {
            (Some(HTTP_2), _) if !http1_only => HttpVersion::Http2,
            (_, UpstreamProtocol::Http2) if !http1_only => {
                return Err(io::Error::other("it does not support HTTP/2: it did not select `h2` by ALPN"));
            }
            _ => HttpVersion::Http1,
        };
        Ok((IoStream::tls(TlsStream::Client(stream)), version))
    }

    fn cleartext_version(&self, http1_only: bool) -> HttpVersion {
        if self.is_http2() && !http1_only { HttpVersion::Http2 } else { HttpVersion::Http1 }
    }
}

/// The attempts to get one connection: each address of the name is tried once.
pub struct Dial<'a> {
    connector: &'a Connector,
    http1_only: bool,
    client: Option<IpAddr>,
    /// The addresses that have failed.
    failed: Vec<SocketAddr>,
    /// Of the address that failed last.
    error: Option<io::Error>,
    /// The name was resolved again.
    has_looked_up: bool,
}

impl Dial<'_> {
    /// Connects to an address that has not failed. After all known addresses, resolves the name again, once: the server may
    /// have moved, and nothing was sent.
    pub async fn connect(&mut self) -> io::Result<Connected> {
        let Connector { server, resolver, .. } = self.connector;
        // Before the look-up, so that a connection to an address that is removed meanwhile is not taken for a current one.
        let generation = resolver.generation();
        if server.scheme == Scheme::Unix {
            let mut stream = UnixStream::connect(&server.host).await?;
            self.connector.send_proxy_header(&mut stream, self.client, None).await?;
            let stream = IoStream::unix(stream);
            let version = self.connector.cleartext_version(self.http1_only);
            return Ok(Connected { stream, version, target: ResolvedTarget { address: None, generation } });
        }
        let mut addresses = resolver.rotated_addresses().await?;
        loop {
            addresses.retain(|address| !self.failed.contains(address));
            if addresses.is_empty() && !std::mem::replace(&mut self.has_looked_up, true) {
                addresses = resolver.new_addresses(&self.failed).await;
            }
            if addresses.is_empty() {
                return Err(self.error.take().unwrap_or_else(|| io::Error::other("the name has no address")));
            }
            match connect_to_first(&addresses).await {
                Err(error) => self.add_failed(&addresses, error),
                Ok((stream, address)) => {
                    match self.connector.start(stream, address, self.http1_only, self.client).await {
                        Ok((stream, version)) => {
                            let target = ResolvedTarget { address: Some(address), generation };
                            return Ok(Connected { stream, version, target });
                        }
                        Err(error) => self.add_failed(&[address], error),
                    }
                }
            }
        }
    }

    /// The connection to an address has failed after it was opened, before a request was sent. `None`: to a Unix socket, which
    /// has no other address.
    pub fn on_failure(&mut self, address: Option<SocketAddr>, error: io::Error) -> io::Result<()> {
        let Some(address) = address else { return Err(error) };
        self.add_failed(&[address], error);
        Ok(())
    }

    fn add_failed(&mut self, addresses: &[SocketAddr], error: io::Error) {
        self.failed.extend(addresses);
        self.error = Some(error);
    }
}

impl Tls {
    async fn handshake(
        &self,
        stream: StreamSocket,
        http1_only: bool,
    ) -> io::Result<tokio_rustls::client::TlsStream<StreamSocket>> {
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
