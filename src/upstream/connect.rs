//! The way to one server until bytes can flow: name, address, TLS, and what will be spoken.
//!
//! All addresses of a name are tried, each beginning with another one: the next as soon as one fails, or
//! while one is silent (RFC 8305, "happy eyeballs"). The first that stands is taken.

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

use super::dns::Names;
use crate::clock::Clock;
use crate::config::{Protocol, Scheme, Server, TransportSettings};
use crate::io_stream::IoStream;

/// How long an address may be silent before the next one is tried beside it.
const PATIENCE: Duration = Duration::from_millis(250);
const HTTP_2: &[u8] = b"h2";
const HTTP_1: &[u8] = b"http/1.1";

/// What a connection speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spoken {
    Http1,
    Http2,
}

/// A stream that stands.
pub struct Dialed {
    pub wire: IoStream,
    pub spoken: Spoken,
    /// `None` for a Unix socket.
    pub address: Option<SocketAddr>,
}

pub struct Dial {
    server: Server,
    protocol: Protocol,
    pub names: Rc<Names>,
    tls: Option<Tls>,
}

struct Tls {
    name: Result<ServerName<'static>, String>,
    /// Offers what the upstream may be spoken to in.
    usual: Arc<ClientConfig>,
    /// Offers HTTP/1.1 only.
    plain: Arc<ClientConfig>,
}

impl Dial {
    pub fn new(server: Server, way: &TransportSettings, clock: Clock) -> Dial {
        let names = Names::new(&server.host, server.port, way.resolve, clock);
        let tls = way.tls.as_ref().filter(|_| server.scheme == Scheme::Https).map(|tls| {
            let usual: &[&[u8]] = match way.protocol {
                Protocol::Auto => &[HTTP_2, HTTP_1],
                Protocol::Http1 => &[HTTP_1],
                Protocol::Http2 => &[HTTP_2],
            };
            let host = || {
                ServerName::try_from(server.host.clone())
                    .map_err(|_invalid| format!("no certificate can be for `{}`", server.host))
            };
            Tls {
                name: tls.server_name.clone().map_or_else(host, Ok),
                usual: tls.offering(usual),
                plain: tls.offering(&[HTTP_1]),
            }
        });
        Dial { server, protocol: way.protocol, names, tls }
    }

    /// Whether HTTP/2 is all that is spoken here.
    pub fn is_http2(&self) -> bool {
        self.protocol == Protocol::Http2
    }

    /// Opens a stream. `plain`: one that speaks HTTP/1.1, whatever the server would choose.
    pub async fn open(&self, plain: bool) -> io::Result<Dialed> {
        if self.server.scheme == Scheme::Unix {
            let stream = UnixStream::connect(&self.server.host).await?;
            return Ok(Dialed { wire: IoStream::unix(stream), spoken: self.in_the_clear(plain), address: None });
        }
        let addresses = self.names.in_turn().await?;
        let (stream, address) = match first_of(&addresses).await {
            Ok(connected) => connected,
            Err(error) => {
                self.names.doubt();
                return Err(error);
            }
        };
        stream.set_nodelay(true)?;
        let address = Some(address);
        let Some(tls) = &self.tls else {
            return Ok(Dialed { wire: IoStream::tcp(stream), spoken: self.in_the_clear(plain), address });
        };
        let stream = tls.shake_hands(stream, plain).await?;
        let spoken = match (stream.get_ref().1.alpn_protocol(), self.protocol) {
            (Some(HTTP_2), _) if !plain => Spoken::Http2,
            (_, Protocol::Http2) if !plain => {
                return Err(io::Error::other("it does not speak HTTP/2: it did not choose `h2` by ALPN"));
            }
            _ => Spoken::Http1,
        };
        Ok(Dialed { wire: IoStream::tls(TlsStream::Client(stream)), spoken, address })
    }

    fn in_the_clear(&self, plain: bool) -> Spoken {
        if self.is_http2() && !plain { Spoken::Http2 } else { Spoken::Http1 }
    }
}

impl Tls {
    async fn shake_hands(
        &self,
        stream: TcpStream,
        plain: bool,
    ) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
        let config = if plain { &self.plain } else { &self.usual };
        let name = self.name.clone().map_err(io::Error::other)?;
        let shaken = TlsConnector::from(Arc::clone(config)).connect(name, stream).await;
        shaken.map_err(|error| io::Error::other(format!("TLS: {error}")))
    }
}

type Attempt<'a> = Pin<Box<dyn Future<Output = io::Result<TcpStream>> + 'a>>;

/// The first of the addresses that can be connected to.
async fn first_of(addresses: &[SocketAddr]) -> io::Result<(TcpStream, SocketAddr)> {
    if let [only] = addresses {
        return Ok((TcpStream::connect(only).await?, *only));
    }
    let mut untried = addresses.iter();
    let mut attempts: Vec<(SocketAddr, Attempt<'_>)> = Vec::new();
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
            match untried.next() {
                Some(next) => {
                    attempts.push((*next, Box::pin(TcpStream::connect(*next))));
                    patience.set(sleep(PATIENCE));
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
